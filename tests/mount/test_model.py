# SPDX-License-Identifier: Apache-2.0
"""A real model, loaded from the mounted step by libraries that think it is a directory like any other."""
import pytest

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
