"""Names that command lines offer, spelled here so that --help waits neither for JAX nor for a missing package."""

# PRESETS and LAYOUTS are those of `mixedres.precision` and `mixedres.checkpoints`.
PRESETS = ("fp32", "tf32", "bf16", "fp16", "fp16_static", "fp16_rewrite", "bf16_rewrite")
LEVELS = ("default", "allow_only", "infer_as_deny")
LAYOUTS = ("mixedres", "torchvision", "transformers")
# Height and width of a network's input: a larger one is a mistake or an attack.
MOST_SIDE = 8192
# The flags of one of many processes.
PROCESS_FLAGS = "--coordinator=HOST:PORT --num_processes=N --process_id=I"
