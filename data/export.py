"""Token stores in the layouts of other trainers. Megatron-LM and its forks read a store as it is.

| target  | files                        | made of                                                                 |
|---------|------------------------------|-------------------------------------------------------------------------|
| nanogpt | train.bin, val.bin, meta.pkl | uint16; val: the last `val_fraction`, cut at a document; no meta for GPT-2 |
| olmo    | NNNNN.npy                    | raw tokens without a header, despite the name: a link to the shard      |
| llmc    | tokens_NNNNNN.bin            | 256 int32 (magic, version, tokens), then the tokens                     |
| parquet | NNNNN.parquet                | one row a document, column `input_ids`                                  |
"""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..core.artifact import check_free
from ..core.console import progress
from ..core.errors import WrongUse
from ..core.files import written_aside
from .shard import Shard
from .store import TokenStore
from .tokenizer import Tokenizer, tokenizer_beside

Target = Literal["nanogpt", "olmo", "llmc", "parquet"]
CHUNK = 1 << 22  # tokens moved at a time
# magic and version that llm.c's data loader asks for: GPT-2 tokens as uint16, Llama 3 tokens as uint32
LLMC_HEADER = {np.dtype(np.uint16): (20240520, 1), np.dtype(np.int32): (20240801, 7)}
ROWS = 10_000


def export_store(path: Path | str, target: Target, out: Path | str, val_fraction: float = 0.0) -> list[Path]:
    """Write the store `path` in another layout into `out`, whole or not at all; returns the files. Raises WrongUse."""
    store = TokenStore.open(path)
    check_free(out)
    if val_fraction and target != "nanogpt":
        fix = "leave it out; the last shards can serve to validate"
        raise WrongUse(f"{target} has no part for validation", where="--val-fraction", fix=fix)
    if target == "llmc" and store.dtype not in LLMC_HEADER:
        why, fix = f"llm.c reads uint16 and uint32, this store is {store.dtype}", "export to olmo or parquet"
        raise WrongUse("ids of a width that llm.c does not read", where=path, why=why, fix=fix)
    with written_aside(out) as folder, progress(f"export {target}", store.tokens, "token") as bar:
        if target == "nanogpt":
            _nanogpt(store, folder, val_fraction, Path(path), bar)
        for number, shard in enumerate(store.shards):
            if target == "olmo":
                try:
                    os.link(shard.bin.resolve(), folder / f"{number:05d}.npy")
                except OSError:  # another file system
                    shutil.copyfile(shard.bin, folder / f"{number:05d}.npy")
            elif target == "llmc":
                _llmc(shard, folder / f"tokens_{number:06d}.bin")
            elif target == "parquet":
                _parquet(shard, folder / f"{number:05d}.parquet")
            bar.advance(shard.tokens if target != "nanogpt" else 0)
    return sorted(Path(out).iterdir())


def _nanogpt(store: TokenStore, folder: Path, val_fraction: float, source: Path, bar: Any) -> None:
    if store.dtype != np.uint16:
        why = f"nanoGPT reads uint16; this store of {store.facts.get('vocab_size', 'many'):,} entries is {store.dtype}"
        raise WrongUse("ids too large for nanoGPT", why=why, fix="export to olmo, llmc or parquet")
    parts = {"train": store}
    if val_fraction:
        parts = {"train": store.view(0.0, 1 - val_fraction), "val": store.view(1 - val_fraction, 1.0)}
    for name, part in parts.items():
        with open(folder / f"{name}.bin", "wb") as file:
            for start in range(0, part.tokens, CHUNK):
                tokens = part.read(start, min(start + CHUNK, part.tokens))
                file.write(tokens.astype("<u2").data)
                bar.advance(len(tokens))
    if not (place := tokenizer_beside(source)).is_file():
        return
    tokenizer = Tokenizer.load(place)
    # GPT-2's is taken for granted where there is no meta.pkl
    if tokenizer.vocab_size != 50257 or tokenizer.encode("Hello world").tolist() != [15496, 995]:
        texts = {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
        first = {text: i for i, text in reversed(texts.items())}
        meta = {"vocab_size": tokenizer.vocab_size, "stoi": first, "itos": texts}
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def _llmc(shard: Shard, target: Path) -> None:
    if shard.tokens >= 2**31:
        why = f"{shard.tokens:,} tokens, its limit is 2^31"
        raise WrongUse("a shard is too large for llm.c", where=shard.bin, why=why)
    header = np.zeros(256, "<i4")
    header[:2] = LLMC_HEADER[shard.dtype]
    header[2] = shard.tokens
    with open(target, "wb") as file:
        file.write(header.data)
        with open(shard.bin, "rb") as tokens:
            shutil.copyfileobj(tokens, file, CHUNK)


def _parquet(shard: Shard, target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    starts, data = shard.sequence_start(shard.bounds), shard.data
    schema = pa.schema([("input_ids", pa.large_list(pa.from_numpy_dtype(shard.dtype)))])
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for first in range(0, shard.documents, ROWS):
            bounds = starts[first : first + ROWS + 1]
            ids = pa.LargeListArray.from_arrays(bounds - bounds[0], pa.array(data[bounds[0] : bounds[-1]]))
            writer.write_table(pa.table([ids], schema))
