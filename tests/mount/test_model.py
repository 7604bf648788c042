# SPDX-License-Identifier: Apache-2.0
"""A real model, loaded from the mounted step by libraries that think it is a directory like any other."""
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from .conftest import Mount

TEXTS = ["A checkpoint is a promise.", "Files are a good interface.", "42"]


@pytest.fixture(scope="module")
def step(program, vckpt, minilm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    vckpt("init", folder / "store")
    vckpt("import", folder / "store", "minilm", minilm)
    m = Mount(program, folder / "store", folder / "mnt")
    yield m / "minilm" / "latest"
    m.end()


def test_the_weights_file_is_the_source(step, minilm):
    assert (step / "model.safetensors").read_bytes() == (minilm / "model.safetensors").read_bytes()
    for path in minilm.rglob("*"):
        hidden = any(part.startswith(".git") or part == "__pycache__" for part in path.relative_to(minilm).parts)
        if path.is_file() and not hidden and path.suffix not in (".safetensors", ".bin", ".pt"):
            assert (step / path.relative_to(minilm)).read_bytes() == path.read_bytes(), path


def test_auto_model(step, minilm):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    outputs = []
    for folder in (minilm, step):
        tokens = transformers.AutoTokenizer.from_pretrained(str(folder))(TEXTS, padding=True, return_tensors="pt")
        model = transformers.AutoModel.from_pretrained(str(folder)).eval()
        with torch.no_grad():
            outputs.append(model(**tokens).last_hidden_state)
    assert torch.equal(*outputs)


def test_sentence_transformer(step, minilm):
    module = pytest.importorskip("sentence_transformers")
    want, got = (module.SentenceTransformer(str(folder), device="cpu").encode(TEXTS) for folder in (minilm, step))
    assert want.shape[0] == len(TEXTS) and (want == got).all()


def like_diffusers(folder):
    """{part: tensors}: what model_index.json names, from the weights that each folder has, by their index if there is
    one."""
    found = {}
    for part in json.loads((folder / "model_index.json").read_text()):
        index = folder / part / "diffusion_pytorch_model.safetensors.index.json"
        names = {"diffusion_pytorch_model.safetensors"}
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
        found[part] = {key: value for name in names for key, value in load_file(folder / part / name).items()}
        assert (folder / part / "config.json").is_file()
    return found


def like_peft(folder):
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
    return load_file(folder / "adapter_model.safetensors")


def test_parts_variants_adapters_and_pipelines(program, vckpt, tmp_path):
    """Each reader finds its files, in the mount and in an export, and reads the same."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source, store = tmp_path / "source", tmp_path / "store"

    def model(seed):
        torch.manual_seed(seed)
        return transformers.BertModel(transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=200)).eval()
    saved = {("", None): model(1), ("", "fp16"): model(2), ("text_encoder", None): model(3)}
    saved["", None].save_pretrained(source, max_shard_size="30KB")
    saved["", "fp16"].save_pretrained(tmp_path / "fp16", variant="fp16")
    (tmp_path / "fp16/model.fp16.safetensors").rename(source / "model.fp16.safetensors")
    saved["text_encoder", None].save_pretrained(source / "text_encoder", max_shard_size="30KB")
    assert len(list(source.glob("model-*.safetensors"))) > 2 and not (source / "model.safetensors").exists()
    pipeline, adapter = tmp_path / "pipeline", tmp_path / "adapter"
    for part in ("unet", "vae"):
        (pipeline / part).mkdir(parents=True)
        (pipeline / part / "config.json").write_text("{}")
    (pipeline / "model_index.json").write_text(json.dumps({"unet": 1, "vae": 1}))
    arrays = [{f"t{i}": np.random.default_rng(i).random((50, 30))} for i in range(3)]
    for i in (0, 1):
        save_file(arrays[i], pipeline / f"unet/diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors")
    (pipeline / "unet/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {f"t{i}": f"diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors" for i in (0, 1)}}))
    save_file(arrays[2], pipeline / "vae/diffusion_pytorch_model.safetensors")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file(arrays[0], adapter / "adapter_model.safetensors")
    vckpt("init", store)
    (tmp_path / "out").mkdir()
    for path in (source, pipeline, adapter):
        vckpt("import", store, path.name, path)
        vckpt("export", store, f"{path.name}/0", tmp_path / "out" / path.name)
    m = Mount(program, store, tmp_path / "mnt")
    try:
        for root in [lambda name: m / name / "latest", lambda name: tmp_path / "out" / name]:
            for (folder, variant), wanted in saved.items():
                got = transformers.AutoModel.from_pretrained(str(root("source")), subfolder=folder, variant=variant)
                assert all(map(torch.equal, got.state_dict().values(), wanted.state_dict().values()))
            for read, path in [(like_diffusers, pipeline), (like_peft, adapter)]:
                np.testing.assert_equal(read(root(path.name)), read(path))
    finally:
        m.end()
