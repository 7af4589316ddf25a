"""Check of a folder of photographs: ``python -m mixedres.data.check DIR``."""
