# SPDX-License-Identifier: Apache-2.0
"""LazyTensor.torch: parts of tensors as torch's, of every dtype, those that numpy lacks among them."""
import torch

import vckpt


def test_parts_as_tensors(tmp_path):
    w = torch.randn(4, 6)
    state = {"m": {"w": w, "half": w.bfloat16(), "one": torch.tensor(True), "f8": w.to(torch.float8_e5m2)}}
    vckpt.save(tmp_path / "store/run", state, pin="no")
    vckpt.close()
    with vckpt.open(tmp_path / "store/run") as step:
        assert torch.equal(step["m/half"].torch(), w.bfloat16()) and torch.equal(step["m/w"].torch(), w)
        assert torch.equal(step["m/half"].torch((slice(3, None, -2), slice(1, 4))), w.bfloat16()[[3, 1], 1:4])
        assert torch.equal(step["m/w"].torch(2), w[2]) and step["m/w"].torch((2, 1)) == w[2, 1]
        one = step["m/one"].torch()
        assert one.shape == () and one.dtype == torch.bool and one.item() is True
        assert torch.equal(step["m/f8"].torch(slice(0, 2)).view(torch.uint8), state["m"]["f8"][:2].view(torch.uint8))
        assert step["m/half"].torch((0, 0)) == w.bfloat16()[0, 0] and step["m/w"].torch(slice(2, 2)).shape == (0, 6)
        step["m/w"].torch().add_(1)             # memory of its own
        step["m/w"].torch(slice(0, 2)).add_(1)
