"""The kinds of task by the name that a task file gives."""

from .choices import MultipleChoice, Partial
from .core import Core
from .kind import Kind
from .likelihood import LogLikelihood
from .masks import Cloze, Masked
from .texts import LastToken, Rolling, Stream
from .written import GenerateUntil

KINDS: dict[str, type[Kind]] = {
    "multiple_choice": MultipleChoice,
    "partial": Partial,
    "loglikelihood": LogLikelihood,
    "last_token": LastToken,
    "rolling": Rolling,
    "stream": Stream,
    "generate_until": GenerateUntil,
    "cloze": Cloze,
    "masked": Masked,
    "core": Core,
}
