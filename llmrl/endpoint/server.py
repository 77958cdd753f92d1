"""`Endpoint`: an OpenAI-compatible server in a thread of this process, over a `TurnSampler`.

Requests run concurrently: wrap an engine that answers one call at a time in `BatchingEngine`, which joins them.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from llmrl.endpoint.chat import BadRequestError, ChatRequest, Completion, Head, answer_message, to_json, without_stop
from llmrl.endpoint.connections import with_joined_writes
from llmrl.endpoint.generate import GenerateRequest
from llmrl.endpoint.messages import CountTokensRequest, MessagesRequest
from llmrl.endpoint.responses import ResponsesRequest
from llmrl.endpoint.streams import CertainText, Listener
from llmrl.envs.llm.tool_calls import call_format
from llmrl.errors import ConfigError, DataError, DeadlineError, LLMRLError, RolloutError, ShapeError, TemplateError
from llmrl.modules.llm.conversation import Message, SampledTurn, TurnSampler
from llmrl.modules.llm.engines.base import SamplingParams, StopReason
from llmrl.optional import require

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from torch import Tensor

Record = Callable[[Sequence[Message]], None]
# What a request's body is read as: it has `as_chat`, the request that is sampled, and `answer`, its Completion in the
# form that the client reads.
_KINDS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/inference/v1/generate": GenerateRequest,
}

_KEEP_ALIVE_S = 3.0  # between comments of a stream that waits for its answer
_LEFT = 499  # the status of a request whose client has left
_EXTRA = {"extra": "serve", "used_by": "Endpoint"}
_START_S = 30.0
_ATTEMPTS = 8  # answers of which one must have the calls that tool_choice demands
_SEED_STEP = 1 << 20  # between the seeds of such answers
_ANSWERS_KEPT = 64  # for clients that ask the same again
_NO_KEY = ("", "EMPTY")  # what clients send that have none
_RETRY_HEADER = "x-stainless-retry-count"  # of the OpenAI and Anthropic clients


@dataclass
class _Work:
    """An answer that is sampled, and the number of clients that wait for it."""

    listener: Listener
    head: Head = field(default_factory=Head.new)
    task: Future[Completion] = field(init=False)
    waiting: int = 0

    @property
    def failed(self) -> bool:
        ended = self.task.done() and (self.task.cancelled() or self.task.exception() is not None)
        return ended or not self.listener.is_wanted


class Endpoint:
    """Serves ``sampler``'s model until it is closed; a context manager.

    model        the name that clients see
    tool_format  of the calls in answers; "auto": the chat template's (`llmrl.envs.llm.tool_calls`)
    api_key      that clients must send; None: any
    host, port   where it listens; port 0: a free one, see ``url``
    max_body     bytes of the largest request
    concurrency  answers that are sampled at the same time; further requests wait

    Raises  MissingDependencyError without the extra "serve"; ConfigError for a port in use; DeadlineError if the server
            does not start
    """

    fixed = False  # True: requests cannot change the sampling distribution

    def __init__(
        self,
        sampler: TurnSampler,
        *,
        model: str = "llmrl",
        tool_format: str = "auto",
        api_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body: int = 64 << 20,
        concurrency: int = 256,
    ) -> None:
        self.sampler, self.model, self.api_key = sampler, model, api_key
        self._engine = sampler.engine
        self.form = call_format(tool_format, sampler.renderer.template.jinja)
        self.counters: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._max_body = max_body
        self._answers: OrderedDict[tuple[str, ...], _Work] = OrderedDict()
        route = _starlette("routing").Route
        routes = [
            *(route(path, partial(self._answer, kind), methods=["POST"]) for path, kind in _KINDS.items()),
            route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
            route("/v1/models", self._models),
            route("/health", lambda request: _response({})),
        ]
        app, uvicorn = _starlette("applications").Starlette(routes=routes), require("uvicorn", **_EXTRA)
        settings: dict[str, Any] = {"log_level": "warning", "lifespan": "off", "timeout_graceful_shutdown": 5}
        protocol = require("uvicorn.protocols.http.httptools_impl", **_EXTRA).HttpToolsProtocol
        settings |= {"http": with_joined_writes(protocol)}
        settings |= {"access_log": False, "proxy_headers": False, "ws": "none"}  # each would cost every request time
        # Longer than clients keep an idle connection (5 s is usual): a request must not meet the end of its connection.
        settings["timeout_keep_alive"] = 60
        self._server = uvicorn.Server(uvicorn.Config(app, **settings))
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(
                f"Endpoint: must be able to listen at {host}:{port}: {error.strerror or error}; end what listens "
                "there, or choose another port (0: a free one)."
            ) from None
        # Connections take this from it. Without it an answer's body waits 40 ms for the client to confirm its headers:
        # asyncio sets it only for sockets that were made with the protocol's number.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="llmrl-endpoint")
        self._thread = threading.Thread(target=self._run, name="llmrl-endpoint", daemon=True)
        # Requests make many small objects, so the garbage collector runs in most of them: it need not look through what
        # is here already, models and modules.
        _freeze()
        self._thread.start()
        end = time.monotonic() + _START_S
        while not self._server.started:
            if time.monotonic() > end or not self._thread.is_alive():
                raise DeadlineError(f"Endpoint: the server at {self.url} must start within {_START_S:g} s: it did not.")
            time.sleep(0.005)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:  # uvloop's where it exists
            runner.run(self._server.serve(sockets=[self._socket]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server; requests in progress are answered with an error after 5 s. A second call does nothing."""
        _freeze()
        gc.unfreeze()
        self._server.should_exit = True
        self._thread.join(_START_S)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    def count(self, counts: Mapping[str, int]) -> None:
        """Adds to the counters; several threads may."""
        with self._counting:
            self.counters.update(counts)

    # --- what a subclass decides --------------------------------------------------------------------------------------

    def check_key(self, key: str) -> None:
        """Raises BadRequestError, with status 401, for a key of a client that may not ask."""
        if self.api_key is not None and not secrets.compare_digest(key, self.api_key):
            raise BadRequestError("the API key is not this server's.", status=401, code="invalid_api_key")

    def sample(
        self, key: str, session: str, messages: list[dict[str, Any]] | Tensor, **options: Any
    ) -> tuple[list[SampledTurn], Record]:
        """The answers to a request, and a function that is called with their messages if the client still waits.

        Runs in a thread; ``session``: what the client calls its conversation; ``options``: of `TurnSampler.sample`.
        """
        return self.sampler.sample(messages, **options), lambda said: None

    def prompt(self, key: str, messages: list[dict[str, Any]], tools: Any) -> Tensor:
        """int64[P]: the ids that `sample` would ask the model with. Runs in a thread."""
        return self.sampler.prompt(messages, tools=tools)

    def message(self, turn: SampledTurn) -> dict[str, Any]:
        """The answer as the client gets it."""
        return answer_message(turn, self.form, secrets.token_hex(8))

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "llmrl"}
        entry["max_model_len"] = self.sampler.max_tokens
        return _response({"object": "list", "data": [entry]})

    async def _count_tokens(self, request: Request) -> Response:
        kind = CountTokensRequest
        try:
            key, _ = _caller(request)
            self.check_key(key)
            asked = kind.read(await self._body(request)).as_chat()
            prompt = partial(self.prompt, key, asked.chat(), asked.offered)
            ids = await asyncio.get_running_loop().run_in_executor(self._pool, prompt)
        except Exception as error:
            return self._failure(error, kind)
        return _response({"input_tokens": len(ids)})

    async def _answer(self, kind: type[Any], request: Request) -> Response:
        self.count({"requests": 1})
        try:
            key, session = _caller(request)
            self.check_key(key)
            body = await self._body(request)
            asked = kind.read(body)
            work = self._begin(key, session, request, body, asked)
        except BadRequestError as error:
            return self._failure(error, kind)
        except _starlette("requests").ClientDisconnect:
            return _response({}, _LEFT)
        if asked.stream:
            return _starlette("responses").StreamingResponse(self._events(work, asked), media_type="text/event-stream")
        gone = asyncio.ensure_future(_disconnected(request))
        gone.add_done_callback(work.listener.wake)
        try:
            while not (work.task.done() or gone.done()):
                await work.listener.news.wait()
            if not work.task.done():
                return _response({}, _LEFT)
            return _response(asked.answer(work.task.result()).body())
        except asyncio.CancelledError:
            return _response({"error": {"message": "the server ends.", "type": "server_error"}}, 503)
        except Exception as error:
            return self._failure(error, kind)
        finally:
            gone.cancel()
            self._leave(work)

    def _begin(self, key: str, session: str, request: Request, body: bytes, asked: Any) -> _Work:
        """Starts an answer; or the one that is under way or was given, if a client repeats its request."""
        name = request.headers.get("idempotency-key", "")
        repeats = request.headers.get(_RETRY_HEADER, "0") != "0"
        place = (key, session, request.scope["path"])
        same = (*place, name) if name else (*place, "", str(hash(body)))
        if (name or repeats) and (known := self._answers.get(same)) is not None and not known.failed:
            self.count({"replayed": 1})
            known.waiting += 1
            return known
        chat = asked.as_chat()
        params, overridden = chat.params(self.sampler.params, fixed=self.fixed)
        if overridden:
            self.count({f"overridden/{name}": 1 for name in overridden})
        work = _Work(Listener([self._text(chat) for _ in range(chat.n or 1)] if asked.stream else ()), waiting=1)
        self._answers[same] = work
        work.task = self._pool.submit(self._complete, key, session, chat, params, work)
        work.task.add_done_callback(work.listener.wake_soon)
        while len(self._answers) > _ANSWERS_KEPT:
            self._answers.popitem(last=False)
        return work

    def _text(self, asked: ChatRequest) -> CertainText:
        renderer, ends = self.sampler.renderer, (*self.sampler.renderer.stop_token_ids, *self._engine.eos_token_ids)
        return CertainText(renderer, self.form if asked.offered else None, asked.stops, ends)

    def _leave(self, work: _Work) -> None:
        """A client that does not wait for the answer any more; the last one ends the sampling, if the engine can."""
        work.waiting -= 1
        if not work.task.done():
            self.count({"left": 1})
            work.listener.is_wanted = work.waiting > 0 or not self._engine.streams

    def _complete(self, key: str, session: str, asked: ChatRequest, params: SamplingParams, work: _Work) -> Completion:
        """The answer; in a thread of the pool."""
        count = asked.n or 1
        options: dict[str, Any] = {"tools": asked.offered, "params": params}
        options |= {"count": count, "seeds": None if asked.seed is None else [asked.seed + n for n in range(count)]}
        # Of forced calls nothing is streamed before the answer is known to have them.
        options |= {"hear": work.listener.begin} if self._engine.streams and not asked.is_forced else {}
        for _ in range(_ATTEMPTS):
            turns, record = self.sample(key, session, asked.chat(), **options)
            if not work.waiting or not work.listener.is_wanted:
                self.count({"abandoned": 1})
                raise RolloutError("the client left before its answer was there.")
            said = [self.message(turn) for turn in turns]
            if all(map(asked.accepts, said)):
                break
            if asked.seed is not None:
                options["seeds"] = [seed + _SEED_STEP for seed in options["seeds"]]
        else:
            raise BadRequestError(
                f"tool_choice: none of {_ATTEMPTS} answers had the calls that it demands; use auto, or a prompt that "
                "asks for them.",
                field="tool_choice",
            )
        if asked.is_forced:
            self.count({"not_trained/tool_choice": len(turns)})
            for turn in turns:
                turn.is_chosen = True
        for turn, message in zip(turns, said, strict=True):
            if turn.stop_reason is StopReason.STOP_STRING:
                without_stop(message, asked.stops)
        rest = work.listener.rest(turns, said)
        record(said)
        return Completion(asked, work.head, turns, said, rest, self.sampler.renderer.tokenizer)

    async def _events(self, work: _Work, asked: Any) -> AsyncIterator[str]:
        """The answer's events; comments while there are none, so that the client goes on waiting."""
        events, listener, read = asked.events(work.head, self.sampler.renderer.tokenizer), work.listener, 0
        try:
            while True:
                news, is_done = listener.news, work.task.done()
                found: list[str] = []
                if not read and listener.pieces:
                    found += events.begin(listener.prompt_ids)
                for piece in listener.pieces[read:]:
                    found += events.piece(piece)
                read = len(listener.pieces)
                if is_done:
                    completion = work.task.result()
                    found += () if read else events.begin(completion.turns[0].prompt_ids)
                    found += events.end(completion)
                if found:
                    yield "".join(f"{event}\n\n" for event in found)
                if is_done:
                    return
                try:
                    await asyncio.wait_for(news.wait(), _KEEP_ALIVE_S)
                except TimeoutError:
                    yield ": waiting\n\n"
        except Exception as error:
            name = "event: error\n" if type(asked) is not ChatRequest else ""
            yield f"{name}data: {self._failure(error, type(asked)).body.decode()}\n\n"
        finally:
            self._leave(work)

    def _failure(self, error: BaseException, kind: type[Any]) -> Response:
        """The answer to a request that failed: the client's fault if prompt or template are, else the server's."""
        if isinstance(error, DataError):
            error = BadRequestError(str(error), code="context_length_exceeded")
        elif isinstance(error, TemplateError | ShapeError):  # a ShapeError: ids outside the vocabulary
            error = BadRequestError(str(error))
        if isinstance(error, BadRequestError):
            self.count({"refused": 1})
            return _response(kind.failure(error.body()), error.status)
        name = "server_error" if isinstance(error, LLMRLError) else type(error).__name__
        fields = {"message": str(error), "type": name, "param": None, "code": None}
        return _response(kind.failure({"error": fields}), 500)

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body:
                raise BadRequestError(f"the body must have at most {self._max_body} bytes.", status=413)
            parts.append(part)
        return b"".join(parts)


def _caller(request: Request) -> tuple[str, str]:
    """The API key, and what the client calls its conversation; one that sends no key names it KEY.CONVERSATION."""
    headers = request.headers
    key = headers.get("authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")
    session = headers.get("x-session-id", "")
    return (session.partition(".")[0], session) if key in _NO_KEY else (key, session)


def _freeze() -> None:
    """`gc.freeze`, which would put the youngest objects before the older ones; they stay behind them if all are of the
    oldest generation first. In this order objects that refer to each other end, connections after the client that
    closes them.
    """
    gc.collect(1)
    gc.freeze()


async def _disconnected(request: Request) -> None:
    """Returns when the client of a request that was read has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _starlette(module: str) -> Any:
    return require(f"starlette.{module}", **_EXTRA)


def _response(body: dict[str, Any], status: int = 200) -> Response:
    return _starlette("responses").Response(to_json(body), status, media_type="application/json")
