# SPDX-License-Identifier: Apache-2.0
"""The pools of ranks, one of each size for all tests of a pytest process."""
import pytest

from gloo_pool import Pool
from memorylib import tmp_path_factory  # noqa: F401


def pool_of(world):
    @pytest.fixture(scope="session")
    def pool():
        ranks = Pool(world)
        yield ranks
        ranks.close()
    return pool


pool2, pool3, pool4, pool6 = pool_of(2), pool_of(3), pool_of(4), pool_of(6)
