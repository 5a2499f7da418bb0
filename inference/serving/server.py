"""The endpoints: OpenAI's completions, chat completions and embeddings, fill-mask, classify and rerank,
tokenize, health and metrics, and a page to try them.

No log line holds the text of a request. What stands before the endpoints is in `guard`, the port and the
drain in `listen`, the model in its own process behind `remote`.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ...core.errors import Failed, ThroughlineError, WrongUse
from ...core.logits import log_softmax
from ...core.version import version
from .api_types import (
    ChatBody,
    ClassifyBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    FillMaskBody,
    Generation,
    RerankBody,
    TokenizeBody,
)
from .bodies import BodyRoute
from .completions import Answers, ChatAnswers
from .encoding import fill, frame, frame_pair, mask_text, unit
from .guard import Guard, Keys, add_error_handlers, error_body, told
from .served import Asked, Limits, ServedModel, as_list
from .telemetry import Telemetry, Watch

INLINE_CHARACTERS = 4000  # tokenised on the event loop: less than a millisecond
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold it back
Result = TypeVar("Result")


class Server:
    """The models and what all endpoints share."""

    def __init__(self, models: Sequence[ServedModel], limits: Limits, telemetry: Telemetry) -> None:
        self.models, self.limits, self.telemetry = list(models), limits, telemetry
        self.draining = asyncio.Event()
        self.failure: ThroughlineError | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Start all models; says by `on_ready` or `on_failure` what became of it."""
        try:
            await asyncio.gather(*(model.start() for model in self.models))
        except ThroughlineError as error:
            self.failure = error
            self.on_failure()
            return
        self.on_ready()

    async def close(self) -> None:
        """End the processes of all models."""
        await asyncio.gather(*(model.remote.close() for model in self.models))

    def pick(self, name: str | None, endpoint: str, watch: Watch) -> ServedModel:
        """The model of that name, or the only one that the endpoint fits. Raises HTTPException 404 or
        WrongUse.
        """
        fitting = [
            model for model in self.models if endpoint in (*model.endpoints, "/tokenize", "/detokenize")
        ]
        if name is None:
            if len(fitting) != 1:
                if waiting := next((model for model in self.models if not model.ready), None):
                    waiting.remote.check_room(0)
                names = ", ".join(model.name for model in fitting) or "none"
                why = f"{len(fitting)} models answer {endpoint}: {names}"
                raise WrongUse("which model?", where="model", why=why, fix="give a name from /v1/models")
            found = fitting[0]
        else:
            found = self.find(name)
        watch.model = found.name
        # A full queue is known before anything is tokenised.
        found.remote.check_room(0 if endpoint in ("/tokenize", "/detokenize") else 1)
        if found not in fitting:
            kind = "GPT" if found.causal else "BERT"
            what = f"{found.name} is a {kind} and does not answer {endpoint}"
            why = "it has no chat template" if endpoint.endswith("chat/completions") and found.causal else ""
            raise WrongUse(what, where="model", why=why, fix=f"it answers {' and '.join(found.endpoints)}")
        return found

    def find(self, name: str) -> ServedModel:
        """The model of that name. Raises HTTPException 404."""
        found = next((model for model in self.models if model.name == name), None)
        if found is None:
            raise HTTPException(404, f"there is no model {name[:200]!r}; /v1/models lists them")
        return found


def build_app(server: Server, keys: Sequence[str] = (), origins: Sequence[str] = ()) -> FastAPI:
    """The application; models start with it and end with it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(server.start())
        yield
        starting.cancel()
        await server.close()

    app = FastAPI(title="Throughline", version=version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = BodyRoute
    app.state.telemetry = server.telemetry
    app.add_middleware(
        Guard, limits=server.limits, keys=Keys(keys), telemetry=server.telemetry, draining=server.draining
    )
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    add_error_handlers(app)
    _add_encoder(app, server)  # first come what is asked most: routes are tried in turn
    _add_generation(app, server)
    _add_tokens(app, server)
    _add_status(app, server)
    described = app.openapi

    def openapi() -> dict[str, Any]:
        """The schema, with our errors in the place of FastAPI's 422."""
        schema = described()
        for path in schema["paths"].values():
            for operation in path.values():
                if operation["responses"].pop("422", None):
                    operation["responses"]["4XX"] = {"description": "An error in OpenAI's shape."}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _add_status(app: FastAPI, server: Server) -> None:
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> HTMLResponse:
        policy = "default-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Every model answers; 503 while one loads or the server drains."""
        waiting = [model.name for model in server.models if not model.ready]
        draining = server.draining.is_set()
        counts = {
            name: {model.name: getattr(model.remote, name) for model in server.models}
            for name in ("accepted", "queued", "active")
        }
        fit = not waiting and not draining
        state = {"ready": fit, "waiting_for": waiting, "draining": draining, **counts}
        return JSONResponse(state, 200 if fit else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus's text format."""
        return Response(server.telemetry.page(server.models), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The served models and which endpoints take them."""
        return {"object": "list", "data": [model.describe() for model in server.models]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """One served model."""
        return server.find(name).describe()


def _add_generation(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a text with a GPT; `stream` sends server-sent events."""
        model = server.pick(body.model, "/v1/completions", request.state.watch)
        size = sum(len(prompt) for prompt in as_list(body.prompt))
        asked = await beside(size, lambda: model.completion(body))
        return await _generated(request, server, model, body, asked, Answers(model, body, asked))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation with a GPT that has a chat template."""
        model = server.pick(body.model, "/v1/chat/completions", request.state.watch)
        template = model.chat
        assert template is not None
        ids = await beside(INLINE_CHARACTERS + 1, lambda: template.ids(body.messages))
        most = body.max_completion_tokens or body.max_tokens or model.room(len(ids))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        body.stop = [*body.stops(), *template.ends]
        asked = model.asked(body, "", ids, most, logprobs)
        return await _generated(request, server, model, body, asked, ChatAnswers(model, body, asked))


async def _generated(
    request: Request,
    server: Server,
    model: ServedModel,
    body: Generation,
    asked: list[Asked],
    answers: Answers,
) -> Response:
    watch: Watch = request.state.watch
    deltas = model.generate(asked, watch, whole=not body.stream)
    deadline_s = asyncio.get_running_loop().time() + server.limits.request_s
    if body.stream:
        # The first delta is awaited here: a full queue is a 429, not an error inside a 200.
        try:
            first = await unless_gone(request, deadline_s, anext(deltas))
        except BaseException:
            await deltas.aclose()
            raise
        events = _events(answers.events(first, deltas), deadline_s, watch)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)
    await unless_gone(request, deadline_s, answers.collect(deltas))
    watch.finished()
    return JSONResponse(answers.whole())


async def _events(
    answers: AsyncGenerator[dict[str, Any], None], deadline_s: float, watch: Watch
) -> AsyncIterator[str]:
    """Server-sent events; an error in the middle is told as an event."""
    async with contextlib.aclosing(answers):
        try:
            while True:
                async with asyncio.timeout_at(deadline_s):
                    answer = await anext(answers)
                yield f"data: {json.dumps(answer, ensure_ascii=False)}\n\n"
        except StopAsyncIteration:
            watch.finished()
        except TimeoutError:
            yield f"data: {json.dumps(error_body('the answer took too long', 'server_error'))}\n\n"
        except Failed as error:
            watch.fault = type(error).__name__
            yield f"data: {bytes(told(error).body).decode()}\n\n"
    yield "data: [DONE]\n\n"


def _add_encoder(app: FastAPI, server: Server) -> None:
    async def read(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
        deadline_s = asyncio.get_running_loop().time() + server.limits.request_s
        return await unless_gone(request, deadline_s, work)

    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Embed texts with a BERT."""
        watch: Watch = request.state.watch
        model = server.pick(body.model, "/v1/embeddings", watch)
        texts = as_list(body.input)
        rows = await beside(sum(map(len, texts)), lambda: model.frames(texts))
        want = "sentence_embedding" if body.pooling == "mean" else "cls_embedding"
        answers = await read(request, model.read(rows, watch, [want]))
        vectors = [unit(answer[want]) if body.normalize else answer[want] for answer in answers]
        data = [
            {"object": "embedding", "index": index, "embedding": _vector(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": _usage(rows)})

    @app.post("/v1/fill-mask", response_model=None)
    async def fill_mask(body: FillMaskBody, request: Request) -> Response:
        """The most probable tokens for every mask in a text, with a BERT."""
        watch: Watch = request.state.watch
        model = server.pick(body.model, "/v1/fill-mask", watch)
        text = await beside(len(body.input), lambda: mask_text(model.tokenizer, body.input, *model.sizes))
        work = model.read([text.ids], watch, [], ask=text.ask.tolist(), top_k=body.top_k)
        (answer,) = await read(request, work)
        filled = fill(model.tokenizer, text, answer["ids"], answer["probabilities"])
        return JSONResponse({"object": "list", **filled, "model": model.name, "usage": _usage([text.ids])})

    @app.post("/v1/classify", response_model=None)
    async def classify(body: ClassifyBody, request: Request) -> Response:
        """The class of each text, with a BERT that has been fine-tuned to classify."""
        watch: Watch = request.state.watch
        model = server.pick(body.model, "/v1/classify", watch)
        texts = as_list(body.input)
        rows = await beside(sum(map(len, texts)), lambda: model.frames(texts))
        answers = await read(request, model.read(rows, watch, ["class_logits"]))
        names = model.facts["classes"]
        data = []
        for index, answer in enumerate(answers):
            shares = _shares(answer["class_logits"])
            label = names[int(shares.argmax())]
            data.append({"index": index, "label": label, "probs": shares.tolist(), "num_classes": len(names)})
        return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": _usage(rows)})

    @app.post("/v1/rerank", response_model=None)
    async def rerank(body: RerankBody, request: Request) -> Response:
        """Documents by their score beside a query: the sigmoid of a single class, or the share of the last."""
        watch: Watch = request.state.watch
        model = server.pick(body.model, "/v1/rerank", watch)
        model.check_count(len(body.documents), "documents")
        size = len(body.query) * len(body.documents) + sum(map(len, body.documents))
        pairs = await beside(
            size,
            lambda: [frame_pair(model.tokenizer, body.query, text, *model.sizes) for text in body.documents],
        )
        rows = [ids for ids, _ in pairs]
        work = model.read(rows, watch, ["class_logits"], firsts=[first for _, first in pairs])
        scores = [_score(answer["class_logits"]) for answer in await read(request, work)]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        results = [
            {"index": i, "relevance_score": scores[i]}
            | ({"document": {"text": body.documents[i]}} if body.return_documents else {})
            for i in order
        ]
        return JSONResponse({"model": model.name, "results": results, "usage": _usage(rows)})


def _add_tokens(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """The ids of a text."""
        model = server.pick(body.model, "/tokenize", request.state.watch)

        def ids() -> list[int]:
            if body.add_special_tokens and not model.causal:
                return frame(model.tokenizer, body.prompt, *model.sizes, "prompt").tolist()
            return model.tokenizer.encode(body.prompt).tolist()

        tokens = await beside(len(body.prompt), ids)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": model.facts["context"]})

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """The text of ids."""
        model = server.pick(body.model, "/detokenize", request.state.watch)
        if any(not 0 <= i < model.facts["vocab_size"] for i in body.tokens):
            raise WrongUse("a token id is outside the vocabulary", where="tokens")
        text = await beside(len(body.tokens), lambda: model.tokenizer.decode(body.tokens))
        return JSONResponse({"prompt": text})


async def beside(characters: int, work: Callable[[], Result]) -> Result:
    """Long texts are tokenised beside the event loop: health checks and other answers go on."""
    return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)


async def unless_gone(request: Request, deadline_s: float, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work; give it up when the client goes away, whose slots are then free for others, and with a 504
    after the deadline.
    """
    gone = asyncio.ensure_future(request.receive())  # the body is read: the next message is that it left
    try:
        async with asyncio.timeout_at(deadline_s) as limit:

            def hurry(_: object) -> None:
                limit.reschedule(0.0)

            gone.add_done_callback(hurry)
            try:
                return await work
            finally:
                gone.remove_done_callback(hurry)
    except TimeoutError:
        if gone.done():
            raise HTTPException(499, "the client went away") from None  # for the record only: nobody reads it
        raise HTTPException(504, "the answer took longer than this server allows") from None
    finally:
        gone.cancel()


def _vector(vector_H: np.ndarray, encoding: str) -> list[float] | str:
    """A vector as numbers, or as base64 of float32, little end first."""
    if encoding == "base64":
        return base64.b64encode(vector_H.astype("<f4").tobytes()).decode()
    return vector_H.tolist()


def _shares(logits_C: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(logits_C.astype(np.float64)))


def _score(logits_C: np.ndarray) -> float:
    return (
        float(1 / (1 + np.exp(-float(logits_C[0])))) if len(logits_C) == 1 else float(_shares(logits_C)[-1])
    )


def _usage(rows: Sequence[np.ndarray]) -> dict[str, int]:
    tokens = sum(map(len, rows))
    return {"prompt_tokens": tokens, "total_tokens": tokens}
