"""Copies of the state on several devices: a flipped bit and swapped numbers are noticed, and named."""

import jax
import numpy as np
import pytest

from mixedres._internal.errors import TrainingError
from mixedres._internal.processes import SINGLE
from mixedres.checkpoints import RecordedRun
from mixedres.train.debug import replicas
from tests.train import run_cases

pytestmark = pytest.mark.usefixtures("small_network")


def replicated(state, change=lambda copy: None, devices=4):
    """`state` on devices, with one array of the second device's copy changed."""
    mesh = jax.sharding.Mesh(jax.devices()[:devices], ("data",))

    def place(x, change=lambda copy: None):
        copies = [np.array(x) for _ in range(devices)]
        change(copies[1].reshape(-1))
        arrays = [jax.device_put(copy, device) for copy, device in zip(copies, mesh.devices, strict=True)]
        return jax.make_array_from_single_device_arrays(x.shape, jax.NamedSharding(mesh, jax.P()), arrays)

    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [place(leaves[0], change), *map(place, leaves[1:])])


def flip(bit):
    def change(copy):
        copy.view(np.uint32)[-1] ^= np.uint32(1) << bit

    return change


def swap(copy):
    copy[[0, 2]] = copy[[2, 0]]


STATE = [np.float32([[1.5, -2.0], [-1.5, 4.0]]), np.array(True), np.int32(3), np.zeros(0, np.float16)]


@pytest.mark.parametrize("change", [*map(flip, range(32)), swap])
def test_every_changed_copy_is_named(change):
    replicas.check_copies(replicated(STATE), SINGLE, 7, None)
    message = (
        r"in process 0, device 1 is not that of the 3 other devices after step 7.* the checkpoint of step 5 stands"
    )
    with jax.transfer_guard("disallow"), pytest.raises(TrainingError, match=message):
        replicas.check_copies(replicated(STATE, change), SINGLE, 7, 5)


def test_processes_whose_copies_differ_are_named():
    assert replicas.odd_copies([[5, 5], [5, 5]]) == ""
    assert replicas.odd_copies([[5, 5], [5, 6]]) == "in process 1, device 1 is not that of the 3 other devices"
    assert replicas.odd_copies([[6], [5]]) == "is not the same in process 0, device 0; process 1, device 0"


def test_run_with_a_changed_copy_ends_before_the_checkpoint(tmp_path, monkeypatch):
    check = replicas.check_copies

    def changed(state, group, step, newest):
        check(replicated(state, flip(3), devices=2) if step == 4 else state, group, step, newest)

    monkeypatch.setattr(replicas, "check_copies", changed)
    with pytest.raises(TrainingError, match=r"not the same in .* after step 4.* the checkpoint of step 2 stands"):
        run_cases.fit(run_cases.tiny(), tmp_path)
    assert RecordedRun(tmp_path).contents()["checkpoints"] == [2]
