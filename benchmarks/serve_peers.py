"""The servers that `serve.py` compares with, as someone writes them in an afternoon:
python benchmarks/serve_peers.py plain|litserve|xllamacpp --model DIR --kind gpt|bert --port N [--threads T]
    [--batch B --wait S]

plain: FastAPI and transformers (inference mode, sdpa), one request at a time in each worker process. litserve: the
same model behind LitServe with dynamic batching, prompts padded on the left. xllamacpp: a GGUF file.
"""

import argparse
from pathlib import Path
from typing import Any

try:
    import litserve
except ImportError:  # the plain server runs without it
    litserve = None


class Model:
    """A transformers model with one method that answers a batch of bodies."""

    def __init__(self, directory: Path, kind: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch, self.kind = torch, kind
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json")
        )
        self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(0)
        self.tokenizer.padding_side = "left" if kind == "gpt" else "right"
        family = transformers.AutoModelForCausalLM if kind == "gpt" else transformers.BertModel
        self.model = family.from_pretrained(str(directory), attn_implementation="sdpa").eval()

    def answer(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """An OpenAI-shaped answer for each body."""
        with self.torch.inference_mode():
            return self.complete(bodies) if self.kind == "gpt" else self.embed(bodies)

    def complete(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Greedy answers; a batch goes on until its longest is done."""
        given = self.tokenizer([body["prompt"] for body in bodies], return_tensors="pt", padding=True)
        most = max(body["max_tokens"] for body in bodies)
        made = self.model.generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers = []
        for row, body in enumerate(bodies):
            ids = made[row, given["input_ids"].shape[1] :][: body["max_tokens"]]
            read = int(given["attention_mask"][row].sum())
            usage = {"prompt_tokens": read, "completion_tokens": len(ids), "total_tokens": read + len(ids)}
            choice = {"index": 0, "text": self.tokenizer.decode(ids), "finish_reason": "length"}
            answers.append({"choices": [choice], "usage": usage})
        return answers

    def embed(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Means over real tokens, of length 1."""
        given = self.tokenizer([body["input"] for body in bodies], return_tensors="pt", padding=True)
        given.pop("token_type_ids", None)
        hidden = self.model(**given).last_hidden_state
        real = given["attention_mask"][..., None]
        vectors = self.torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1)).tolist()
        counts = given["attention_mask"].sum(1).tolist()
        return [
            {"data": [{"index": 0, "embedding": vector}], "usage": {"prompt_tokens": n, "total_tokens": n}}
            for vector, n in zip(vectors, counts)
        ]


def plain(model: Model, path: str, port: int) -> None:
    """FastAPI; the model runs in the thread pool, one request at a time, as torch's threads want it."""
    import asyncio
    import socket

    import uvicorn
    from fastapi import FastAPI, Request

    app, one = FastAPI(), asyncio.Lock()

    @app.post(path)
    async def answer(request: Request) -> dict[str, Any]:
        body = await request.json()
        async with one:
            return (await asyncio.to_thread(model.answer, [body]))[0]

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # several workers share the port
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    config = uvicorn.Config(app, log_level="error")
    print("serving", flush=True)  # all workers share the log
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


class BatchedAPI(litserve.LitAPI if litserve else object):  # at module level: LitServe sends it to a process
    """The model behind LitServe's dynamic batching."""

    made_of: tuple[Path, str, int]

    def setup(self, device: str) -> None:
        self.served = Model(*self.made_of)

    def decode_request(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    def predict(self, bodies: Any) -> Any:
        return self.served.answer(bodies)

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> Any:
        return output


def batched(model: tuple[Path, str, int], path: str, port: int, batch: int, wait_s: float) -> None:
    """LitServe with dynamic batching."""
    api = BatchedAPI(max_batch_size=batch, batch_timeout=wait_s, api_path=path)
    api.made_of = model
    server = litserve.LitServer(api, accelerator="cpu", timeout=False)
    server.run(host="127.0.0.1", port=port, log_level="error", generate_client_file=False)


def llamacpp(model: Path, port: int, threads: int, slots: int) -> None:
    """llama.cpp's own HTTP server with continuous batching, as the package xllamacpp holds it."""
    import time

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.hostnames, params.port, params.ui = ["127.0.0.1"], port, False
    params.n_parallel, params.n_ctx = slots, 640 * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    print(xllamacpp.get_system_info(), flush=True)
    _server = xllamacpp.Server(params)  # answers while it lives
    while True:
        time.sleep(60)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("peer", choices=("plain", "litserve", "xllamacpp"))
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--kind", choices=("gpt", "bert"), required=True)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--wait", type=float, default=0.01, help="seconds a batch waits for more")
    chosen = options.parse_args()
    path = "/v1/completions" if chosen.kind == "gpt" else "/v1/embeddings"
    if chosen.peer == "xllamacpp":
        llamacpp(chosen.model, chosen.port, chosen.threads, chosen.batch)
    elif chosen.peer == "plain":
        plain(Model(chosen.model, chosen.kind, chosen.threads), path, chosen.port)
    else:
        model = (chosen.model, chosen.kind, chosen.threads)
        batched(model, path, chosen.port, chosen.batch, chosen.wait)


if __name__ == "__main__":
    main()
