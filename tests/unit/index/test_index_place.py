# SPDX-License-Identifier: Apache-2.0
"""Nobody who can rename what lies around a store, or write in its folder for the index, leads the index astray."""
import os

import numpy as np

from test_save_load import Tensor, api, make  # noqa: F401 (fixtures)


def noise(seed):
    return {("model", "t"): Tensor.random(np.random.default_rng(seed), "f32", (9000,))}


def test_a_store_that_was_swapped_gets_no_index(make):  # noqa: F811
    """Whoever can rename a store puts a link to another one in its place while it is open."""
    store, other = make("store"), make("other")
    store.save("a", noise(5), step=0)
    store.path.rename(store.path.with_name("away"))
    store.path.symlink_to(other.path)
    assert store.update_index().commits == 1
    assert not (other.path / "index").exists() and not (store.path.with_name("away") / "index").exists()


def test_a_folder_that_others_can_write_to_holds_no_index(make):  # noqa: F811
    """There every name may be a link by the next moment."""
    store = make()
    store.save("a", noise(6), step=0)
    (store.path / "index").mkdir()
    os.chmod(store.path / "index", 0o777)
    (store.path / "index" / "data.mdb").write_text("not vckpt's")
    assert store.update_index().commits == 1
    assert [p.name for p in (store.path / "index").iterdir()] == ["data.mdb"]
