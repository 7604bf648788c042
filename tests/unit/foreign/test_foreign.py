# SPDX-License-Identifier: Apache-2.0
"""The readers of what torch writes (core/foreign), without torch: files that it wrote, which are the seeds of the fuzz
targets too, and hostile ones."""
import ctypes
import os
import pathlib
import pickle
import struct

import pytest

CORPUS = pathlib.Path(__file__).resolve().parents[2] / "fuzz" / "corpus"
READ = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t,
                        ctypes.c_void_p)


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 1000)]


class Range(ctypes.Structure):
    _fields_ = [("read", READ), ("arg", ctypes.c_void_p), ("begin", ctypes.c_uint64), ("bytes", ctypes.c_uint64)]


def read_metadata(lib, data):
    """None, or the sentence that says what is wrong."""
    result, error, copy = ctypes.create_string_buffer(1024), Error(), ctypes.create_string_buffer(data, len(data))
    r = lib.foreign_dcp_read(copy, ctypes.c_size_t(len(data)), result, ctypes.byref(error))
    if r == 0:
        lib.foreign_dcp_release(result)
    return error.text.decode() if r < 0 else None


def read_tensor(lib, data):
    result, error = ctypes.create_string_buffer(1024), Error()

    @READ
    def read(_arg, offset, to, n, _error):
        assert offset + n <= len(data)
        ctypes.memmove(to, data[offset:offset + n], n)
        return 0
    span = Range(read, None, 0, len(data))
    r = lib.foreign_tensor_read(ctypes.byref(span), result, ctypes.byref(error))
    return error.text.decode() if r < 0 else None


def seeds(target):
    return sorted(path.name for path in (CORPUS / target).iterdir())


@pytest.mark.parametrize("name", seeds("dcp_metadata"))
def test_metadata_of_every_protocol_and_version(lib, name):
    data = (CORPUS / "dcp_metadata" / name).read_bytes()
    assert read_metadata(lib, data) is None
    for end in range(len(data)):
        assert read_metadata(lib, data[:end]), end


@pytest.mark.parametrize("name", seeds("torch_archive"))
def test_archives_of_tensors(lib, name):
    data = (CORPUS / "torch_archive" / name).read_bytes()
    said = read_tensor(lib, data)
    assert (said is None) == (name not in ("conjugate", "value")), said
    for end in range(0, len(data), 7):
        assert read_tensor(lib, data[:end]), end
    assert read_tensor(lib, data.replace(b"little", b"big\0\0\0"))


class Calls:
    def __reduce__(self):
        return os.system, ("touch called",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_is_called(lib, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "class posix.system is not one of DCP's metadata" in read_metadata(lib, pickle.dumps([Calls()], protocol))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [
    b"\x80\x02cbuiltins\neval\n.", b"\x80\x02(S'x'\nios\nsystem\n.", b"\x80\x02(cos\nsystem\no.", b"\x80\x02\x82\x01.",
    b"cos\nsystem\n(S'x'\ntR.", b"\x80\x04\x8c\x02os\x8c\x06system\x93.", b"\x80\x02ctorch\nnn.Module\n.",
    b"\x80\x04\x8c\x05torch\x8c\x04load\x93.", b"\x80\x02c\n\n.", b"\x80\x02ctorch.\nSize\n.",
    b"\x80\x02ctorch\nSize\x00\n.", b"\x80\x04K\x01K\x02\x93.", b"\x80\x02K\x01)R.", b"\x80\x02K\x01K\x02b.",
    b"\x80\x02ctorch\nSize\nK\x01R.", b"\x80\x02K\x01Q."])
def test_other_classes_and_calls(lib, data):
    assert read_metadata(lib, data)


@pytest.mark.parametrize("data", [
    b"", b".", b"\x80\x02.", b"\x80\x01N.", b"\x80\x06N.", b"\x80\x02(.", b"\x80\x021.", b"\x80\x020.", b"\x80\x022.",
    b"\x80\x02NN.", b"\x80\x02(N.", b"\x80\x02a.", b"\x80\x02Na.", b"\x80\x02]NNu.", b"\x80\x02}(Nu.", b"\x80\x02(Nd.",
    b"\x80\x02s.", b"\x80\x02}s.", b"\x80\x02\x85.", b"\x80\x02(\x85.", b"\x80\x02h\x00.", b"\x80\x02q\x00.",
    b"\x80\x02Nr\xff\xff\xff\xff.", b"\x80\x02Nr\x00\x10\x00\x00.", b"\x80\x02X\xff\xff\xff\xffa.",
    b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffa.", b"\x80\x02\x8b\xff\xff\xff\x7fa.", b"\x80\x02G\x00.",
    b"\x80\x02\x8a\x00.", b"\x80\x04\x95\x00."])
def test_broken_pickles(lib, data):
    assert read_metadata(lib, data)


def test_deep_pickles_need_no_stack(lib):
    n = 300_000
    for data in (b"(" * n + b"t" * n, b"]" * n + b"a" * (n - 1), b"N" + b"\x85" * n, b")" + b"\x85" * n):
        assert "holds something else" in read_metadata(lib, b"\x80\x02" + data + b".")


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def test_lists_that_many_share(lib):
    """A file whose chunks, were each tensor's looked at, would be far more than its bytes."""
    n, module = 3000, "torch.distributed.checkpoint.metadata"

    def made(name):
        return f"c{module}\n{name}\n".encode() + b")\x81}("
    size = b"ctorch\nSize\n(K\x00t\x85R"
    chunk = made("ChunkStorageMetadata") + text("offsets") + size + text("sizes") + size + b"ub"
    properties = (f"c{module}\nTensorProperties\n".encode() + b")\x81(ctorch\nfloat32\nctorch.serialization\n"
                  b"_get_layout\n" + text("torch.strided") + b"\x85R\x89"
                  + f"c{module}\n_MEM_FORMAT_ENCODING\n".encode() + b"K\x00\x85R\x89tb")
    tensor = (made("TensorStorageMetadata") + text("properties") + properties + text("size") + size + text("chunks")
              + b"](" + chunk + b"q\x01" + b"h\x01" * (n - 1) + b"eub")
    first = text("w") + tensor + b"q\x02"
    for more, wrong in ((0, None), (n, "more chunks than the file can describe")):
        entries = first + b"".join(text(f"w{i}") + b"h\x02" for i in range(more))
        data = (b"\x80\x02" + made("Metadata") + text("state_dict_metadata") + b"}(" + entries + b"u"
                + text("storage_data") + b"}ub.")
        said = read_metadata(lib, data)
        assert said is None if wrong is None else wrong in said, said


def test_numbers_with_bytes_that_say_nothing(lib):
    """2, in 12 bytes, as the size of a tensor."""
    data = (CORPUS / "dcp_metadata" / "one-2").read_bytes()
    long = b"\x8a\x0c" + (2).to_bytes(12, "little")
    size = b"K\x02K\x03\x86"
    assert size in data and read_metadata(lib, data.replace(size, long + b"K\x03\x86")) is None
    assert read_metadata(lib, data.replace(size, b"\x8a\x0c" + b"\xff" * 12 + b"K\x03\x86"))


def test_sizes_that_lie(lib):
    data = (CORPUS / "torch_archive" / "plain").read_bytes()
    size = bytes([ord("K"), 4, ord("K"), 6, 0x86])
    assert size in data
    assert "fewer than its shape needs" in read_tensor(lib, data.replace(size, bytes([ord("K"), 5, ord("K"), 6, 0x86])))
    assert "another kind" in read_tensor(lib, data.replace(size, bytes([ord("K"), 4, ord("N"), ord("0"), 0x85])))
