"""Which models a server has: by name, from where and on which devices; opened, replaced and ended while requests go on.

A newer model opens beside the one that it replaces, is warmed up, and takes the requests of the name from then on. The
older one ends when it has answered what it was asked: for that time both are in memory. A model that cannot be opened
answers its requests with a 503 that says why; the others are served.
"""

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from ...core.artifact import is_artifact
from ...core.backend import AUTO, BackendOptions
from ...core.console import say, warn
from ...core.errors import Failed, Refused, ThroughlineError, WrongUse
from ...core.files import walk_files
from ..runtimes.source import no_model
from .accounts import LIMITS, ServerLimits
from .keys import later
from .remote import ModelTotals, Remote
from .served import ServedModel

LOOK_S = 1.0  # between two looks at a watched path
DEVICES = re.compile(r"(.+)@((?:,?(?:auto|cpu|cuda(?::\d+)?)\b)+)")  # PATH@DEVICE,DEVICE


@dataclass(frozen=True)
class Source:
    """A model that can be served: its name, where it lies, and the devices of its own (none: that of all models)."""

    name: str
    path: Path
    devices: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: str) -> "Source":
        """What `[NAME=]PATH[@DEVICE,...]` says; NAME is else the path's last part. Raises WrongUse without a path."""
        name, path, devices = "", spec, ()
        if not Path(spec).exists():
            if found := DEVICES.fullmatch(spec):
                path, devices = found[1], tuple(found[2].split(","))
            if "=" in path and not Path(path).exists():
                name, _, path = path.partition("=")
                if not (name and path):
                    fix = "give NAME=PATH, or PATH alone"
                    raise WrongUse("a model needs a name and a path", where=spec, fix=fix)
        if not Path(path).exists():
            raise no_model(Path(path))
        return cls(name or Path(path).resolve().name, Path(path), devices)

    @property
    def is_run(self) -> bool:
        """Whether it is a run, be it one that has saved nothing yet."""
        return (self.path / "checkpoints").is_dir() or (self.path / "recipe.toml").is_file()

    def version(self) -> "Version | None":
        """What the path holds now: of a run its latest checkpoint, None while it has none; of a link what it leads to.
        Raises OSError and ThroughlineError for what cannot be read.
        """
        place = self.path.resolve(strict=True)
        if self.is_run:
            from ...train.checkpoints.run_directory import LATEST, locate  # a quarter of a second

            if not (place / "checkpoints" / LATEST).exists():
                return None
            place = locate(place)
            if not is_artifact(place):
                fix = f"write the name of a checkpoint into {self.path / 'checkpoints' / LATEST}"
                raise Refused("the run's latest checkpoint is not there", where=place, fix=fix)
        files = [place] if place.is_file() else walk_files(place)
        return Version(place, tuple(_stamp(file) for file in files))

    def model(self, limits: ServerLimits, options: BackendOptions, totals: ModelTotals) -> ServedModel:
        """A model of this source that is not open yet."""
        all_options = [replace(options, device=device) for device in self.devices] or [options]
        remotes = [Remote(self.name, str(self.path), one, limits, totals) for one in all_options]
        return ServedModel(self.name, remotes, limits)


@dataclass(frozen=True)
class Version:
    """What a path held at one moment: the directory or file to open, and a stamp of each file in it."""

    place: Path
    stamps: tuple[tuple[str, int, int, int], ...]


def _stamp(file: Path) -> tuple[str, int, int, int]:
    """Name, size, time of change and inode: they differ when another file has been written there."""
    status = file.stat()
    return str(file), status.st_size, status.st_mtime_ns, status.st_ino


def _reason(error: Exception) -> str:
    """Return the error and its reason in one line."""
    if isinstance(error, ThroughlineError):
        return ": ".join(part for part in (error.what, error.why) if part)
    return f"{type(error).__name__}: {error}"


class Catalogue:
    """The models of a server. `watch`: serve what a path holds whenever that changes; `directory`: models that may be
    loaded by name or path.
    """

    def __init__(
        self,
        specs: Sequence[str],
        limits: ServerLimits = LIMITS,
        options: BackendOptions = AUTO,
        watch: bool = False,
        directory: Path | None = None,
    ) -> None:
        self._limits, self._options, self._watching, self.directory = limits, options, watch, directory
        self._given: dict[str, Source] = {}
        for source in map(Source.of, specs):
            if source.name in self._given:
                what, fix = f"two models are called {source.name!r}", "give names: NAME=PATH"
                raise WrongUse(what, where=source.path, fix=fix)
            self._given[source.name] = source
        self.totals: defaultdict[str, ModelTotals] = defaultdict(ModelTotals)
        self.watch_errors: dict[str, str] = {}  # by name: why what a watched path holds is not served
        self.models = [self._model(source) for source in self._given.values()]
        self._versions: dict[str, Version] = {}  # by name: what a watched path held when it was opened
        self._opening: set[str] = set()
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def sources(self) -> dict[str, Source]:
        """All models that are known, served or not, by name."""
        files = self.directory.iterdir() if self.directory else ()
        beside = {file.name: Source(file.name, file) for file in files if not file.name.startswith(".")}
        return beside | self._given

    def find(self, name: str) -> ServedModel:
        """The model of that name. Raises HTTPException 404."""
        found = self._served(name)
        if found is None:
            raise HTTPException(404, f"there is no model {name[:200]!r}; /v1/models lists them")
        return found

    def describe(self) -> list[dict[str, Any]]:
        served = {model.name: model.describe() for model in self.models}
        for name, error in self.watch_errors.items():
            if name in served:
                served[name]["watch_error"] = error
        absent = {"object": "model", "owned_by": "throughline", "created": 0, "endpoints": [], "ready": False}
        absent |= {"status": {"value": "unloaded"}}
        return [*served.values(), *({"id": name} | absent for name in self.sources() if name not in served)]

    async def start(self) -> None:
        """Open the models that were given; one that cannot be opened keeps its error. Raises the first error when
        there are models and none could be opened.
        """
        await asyncio.gather(*(self._open_first(self._given[model.name], model) for model in self.models))
        failures = [model.failure for model in self.models if model.failure is not None]
        if failures and len(failures) == len(self.models):
            raise failures[0]

    async def close(self) -> None:
        tasks = [*self._tasks, *self._watchers.values()]
        for task in tasks:
            task.cancel()
        models = [model.close() for model in self.models]
        await asyncio.gather(*models, *tasks, return_exceptions=True)

    async def load(self, name: str, path: str | None = None) -> None:
        """Open a model that is known and not served; with a path what is there, in the place of the model that has the
        name now, if one does. Raises WrongUse and HTTPException 404, and what opening raised: the older one then stays.
        """
        source, served = self.sources().get(name), self._served(name)
        if path is not None:
            source = replace(source or Source(name, Path()), path=self._allowed(path))
        elif source is None:
            raise HTTPException(404, f"there is no model {name[:200]!r} to load")
        elif served is not None and served.failure is None:
            fix = 'give {"name": NAME, "path": PATH} to replace it'
            raise WrongUse(f"{name} is loaded already", where="model", fix=fix)
        if name in self._opening:
            raise WrongUse(f"{name} is being opened already", where="model", fix="wait for that request")
        before = self._given.get(name)
        self._opening.add(name)
        self._end_watch(name)
        try:
            version = await asyncio.to_thread(source.version) if self._watching else None
            model = await self._open_beside(source, version)
        except BaseException:
            if before is not None and served is not None:
                self._begin_watch(before, self._versions.get(name))
            raise
        finally:
            self._opening.discard(name)
        self._given[name] = source
        self._switch(model)
        self._begin_watch(source, version)
        say(f"{name} is loaded")

    def unload(self, name: str) -> None:
        """Give no more requests to a model; it ends when it has answered those that it has."""
        model = self.find(name)
        if not (model.facts or model.failure) or name in self._opening:
            raise later(503, f"the model {name} is loading", 5)
        self._end_watch(name)
        self.models.remove(model)
        self._begin(self._retire(model))
        say(f"{name} is unloaded")

    def _served(self, name: str) -> ServedModel | None:
        return next((model for model in self.models if model.name == name), None)

    def _model(self, source: Source) -> ServedModel:
        return source.model(self._limits, self._options, self.totals[source.name])

    def _allowed(self, path: str) -> Path:
        """A path inside the directory of models, or one that the command gave. Raises WrongUse for any other."""
        assert self.directory is not None
        found = Path(os.path.abspath(self.directory / path))
        roots = Path(os.path.abspath(self.directory)), self.directory.resolve()
        given = {Path(os.path.abspath(source.path)) for source in self._given.values()}
        if found not in given and not any(root in found.parents for root in roots):
            fix = f"give a path inside {self.directory}, the directory of --models-dir"
            raise WrongUse("models are not loaded from there", where="path", fix=fix)
        if not found.exists():
            why = f"there is no {found.name} in {found.parent.name}"
            raise WrongUse("no such model", where="path", why=why, fix="see /v1/models for what is there")
        return found

    async def _open_first(self, source: Source, model: ServedModel) -> None:
        """Open a model that the command gave, a watched run as soon as it has a checkpoint."""
        version = None
        try:
            while self._watching and (version := await self._look(source)) is None:
                await asyncio.sleep(LOOK_S)
            await self._start(source, model, version)
        except ThroughlineError as error:
            model.failure = error
        except Exception as error:  # of any library: the other models are served
            model.failure = Failed("the model cannot be opened", why=f"{type(error).__name__}: {error}")
        if model not in self.models:  # another model has been loaded by its name meanwhile
            await model.close()  # it may have been opened after it was ended
            return
        if model.failure is not None:
            warn(f"{model.name} cannot be served: {model.failure}")
        self._begin_watch(source, version)

    async def _start(self, source: Source, model: ServedModel, version: Version | None) -> None:
        model.checkpoint = version.place if version is not None and source.is_run else None
        try:
            await model.start(None if version is None else version.place)
        except BaseException:
            await model.close()
            raise
        if version is not None:
            self._versions[source.name] = version

    async def _open_beside(self, source: Source, version: Version | None) -> ServedModel:
        model = self._model(source)
        await self._start(source, model, version)
        return model

    def _switch(self, newer: ServedModel) -> None:
        """Give the requests of its name to this model; the one that had them ends when it has answered its own."""
        older = self._served(newer.name)
        if older is None:
            self.models.append(newer)
            return
        self.models[self.models.index(older)] = newer
        self._begin(self._retire(older))

    # --- watching ---

    def _begin_watch(self, source: Source, tried: Version | None) -> None:
        if self._watching:
            self._watchers[source.name] = asyncio.create_task(self._watch(source, tried))

    def _end_watch(self, name: str) -> None:
        self.watch_errors.pop(name, None)
        if (watcher := self._watchers.pop(name, None)) is not None:
            watcher.cancel()

    async def _watch(self, source: Source, tried: Version | None) -> None:
        """Serve what the path holds whenever that is another version than the one that was `tried` last. What cannot be
        opened is passed over until it changes again; `watch_errors`, a counter and the log say so.
        """
        seen = tried
        while True:
            await asyncio.sleep(LOOK_S)
            version = await self._look(source)
            if version is None:
                continue
            if version == self._versions.get(
                source.name
            ):  # it is served; after an error it has been put back
                tried = seen = version
                self.watch_errors.pop(source.name, None)
            elif version != tried and version != seen and not source.is_run:
                seen = version  # it may be in the making: open it when the next look finds it unchanged
            elif version != tried:
                tried = seen = version
                await self._serve_version(source, version)

    async def _serve_version(self, source: Source, version: Version) -> None:
        try:
            newer = await self._open_beside(source, version)
        except Exception as error:  # of any library: what is served stays
            self._watch_failed(source, f"{version.place} cannot be served: {_reason(error)}")
            return
        self._switch(newer)
        self.watch_errors.pop(source.name, None)
        say(f"{source.name} is now {version.place.name}")

    async def _look(self, source: Source) -> Version | None:
        """What a watched path holds; None for nothing yet and for what cannot be read, which the next look reads."""
        try:
            return await asyncio.to_thread(source.version)
        except Exception as error:  # a broken link, a damaged file, a file system that is away
            self._watch_failed(source, f"{source.path} cannot be read: {_reason(error)}")
            return None

    def _watch_failed(self, source: Source, error: str) -> None:
        self.totals[source.name].watch_failures += 1
        if self.watch_errors.get(source.name) != error:
            self.watch_errors[source.name] = error
            warn(f"{source.name}: {error}; what is served stays")

    # --- ending ---

    async def _retire(self, model: ServedModel) -> None:
        try:
            await model.finished()
        finally:
            await model.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
