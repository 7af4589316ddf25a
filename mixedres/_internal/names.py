"""Names that command lines offer, spelled here so that --help waits neither for JAX nor for a missing package."""

# Presets of `mixedres.precision`.
PRESETS = ("fp32", "tf32", "bf16", "fp16", "fp16_static", "fp16_rewrite", "bf16_rewrite")
LEVELS = ("default", "allow_only", "infer_as_deny")
# Layouts of `mixedres.checkpoints`: names of a network's tensors.
LAYOUTS = ("mixedres", "torchvision", "transformers")
# Preprocessings of stored images in `mixedres.data`.
PREPROCESSINGS = ("official", "official_fast", "torch")
# Largest height and width of a network's input, in pixels: more is a mistake or an attack.
MOST_SIDE = 8192
# The flags of one of many processes.
PROCESS_FLAGS = "--coordinator=HOST:PORT --num_processes=N --process_id=I"
