"""The body of a request, read by pydantic from its bytes.

FastAPI reads JSON into Python objects, solves the dependencies of an endpoint and keeps stacks of what they
leave open. Our endpoints take a body and the request and leave nothing open; the rest was a third of the
processor time of a request. The signature of an endpoint still describes it in the schema.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.routing import request_response

from ...core.errors import WrongUse


class BodyRoute(APIRoute):
    """A route of an endpoint `(body, request)` that gives a Response; one without a body is left to FastAPI."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self.body_field is not None:
            self.app = request_response(_reading(endpoint, self.body_field.field_info.annotation))


def _reading(
    endpoint: Callable[..., Coroutine[Any, Any, Response]], kind: Any
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    read = TypeAdapter(kind).validate_json

    async def answer(request: Request) -> Response:
        raw = await request.body()
        # A web page may send any other type to any server without asking it first.
        if not is_json(request.headers.get("content-type", "")):
            fix = "send the header Content-Type: application/json"
            raise WrongUse("the body is not said to be JSON", where="body", fix=fix)
        try:
            body = read(raw)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            raise RequestValidationError(
                [problem | {"loc": ("body", *problem["loc"])} for problem in problems]
            ) from None
        return await endpoint(body, request)

    return answer


def is_json(content_type: str) -> bool:
    """Whether this is application/json or a type built on it."""
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
