# SPDX-License-Identifier: Apache-2.0
import pytest

from memorylib import tmp_path_factory  # noqa: F401


@pytest.fixture
def left(vckpt, store):
    """left(run): the steps of the module's `store`."""
    def left(run="a"):
        return [s["step"] for s in vckpt.json("ls", store, run)["steps"]]
    return left
