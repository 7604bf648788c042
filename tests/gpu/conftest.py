# SPDX-License-Identifier: Apache-2.0
"""The device of a test, and its random numbers. Without a device tests are skipped, with the reason."""
import os

import numpy
import pytest

from gpulib import Gpu, Unavailable


@pytest.fixture(scope="module")
def device():
    try:
        return Gpu()
    except Unavailable as e:
        pytest.skip(str(e))


@pytest.fixture
def gpu(device):
    device.current()
    yield device
    device.close()


@pytest.fixture
def rng():
    return numpy.random.default_rng(11)


@pytest.fixture(scope="session")
def torch():
    if os.environ.get("VCKPT_LIBCUDA"):
        pytest.skip("torch knows no stand-in")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch finds no CUDA device")
    return torch
