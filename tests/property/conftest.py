# SPDX-License-Identifier: Apache-2.0
from memorylib import tmp_path_factory  # noqa: F401
