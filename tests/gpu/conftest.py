# SPDX-License-Identifier: Apache-2.0
"""The device of a test, and its random numbers. Without a device tests are skipped, with the reason."""
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
