"""Tensors written in the safetensors format in pieces.

The library's writer gives no hash, and one of the file read back would not tell what was written from what was
meant. Here a piece of memory is hashed and handed to the system in one pass, without the interpreter's lock or a copy.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

PIECE_BYTES = 1 << 20
# https://huggingface.co/docs/safetensors: 8 bytes of header length, a JSON header, the tensors
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write contiguous tensors of the host to a new file and flush it to the disk; the sha256 of its bytes."""
    ordered = sorted(
        tensors.items(), key=lambda item: (-item[1].element_size(), item[0])
    )  # every tensor lies aligned
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        begin = memoryview(len(text).to_bytes(8, "little") + text)
        for view in (begin, *(_bytes(tensor) for _, tensor in ordered)):
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                file.write(piece)
                digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
