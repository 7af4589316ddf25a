"""The files of checkpoints, as tests name them, and disks that are slow or full when a checkpoint is written."""

from mixedres.checkpoints import folder

# Names of the folders of saves that were killed, of this version and of 0.2 and 0.3.
PARTIAL = ("{}.tmp", "{}.orbax-checkpoint-tmp")


def before_each(patch, action):
    """Calls `action` with the step of each checkpoint before its arrays are written."""
    write = folder.safetensors.numpy.save_file

    def wait_and_write(arrays, path, **options):
        action(int(path.parent.stem))
        write(arrays, path, **options)

    patch.setattr(folder.safetensors.numpy, "save_file", wait_and_write)


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")
