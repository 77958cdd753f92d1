"""vLLM servers in Ray actors, placed by a cluster: the engines of ``rollout.ray``."""

from __future__ import annotations

import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from llmrl.concurrency.server_process import ServerProcess
from llmrl.errors import ConfigError, WorkerError
from llmrl.optional import require

_REACHED_S = 5.0  # timeout of a connection to the cluster's address
_ENDING_S = 30.0  # for a server to exit by itself
_PERIOD_S = 0.5


@dataclass(frozen=True)
class RayPlan:
    """The servers that a cluster is to place: their number, and Ray's resources for each."""

    address: str
    engines: int
    resources: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        each = ", ".join(f"{name} {count:g}" for name, count in self.resources.items())
        actors = "a Ray actor" if self.engines == 1 else f"{self.engines} Ray actors"
        return f"vLLM in {actors} ({self.address}; each {each or 'without resources'})"


def connect(address: str, starting: AbstractContextManager[Any] | None = None) -> Any:
    """The module ``ray``, connected to the cluster at ``address``: "auto" finds one on this machine or in RAY_ADDRESS,
    "local" starts one inside the context ``starting``. An existing connection is kept.

    Raises  ConfigError, within seconds, if there is no cluster
    """
    ray = require("ray", extra="ray", used_by="rollout.ray")
    if ray.is_initialized():
        return ray
    remedy = "start one by `ray start --head`, or give rollout.ray=local, or the host:port of its head node"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if address == "local":
            with starting or nullcontext():
                ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        else:
            if address == "auto":
                services = require("ray._private.services", extra="ray", used_by="rollout.ray")
                address = services.canonicalize_bootstrap_address_or_die("auto")
            host, _, port = address.removeprefix("ray://").rpartition(":")
            with socket.create_connection((host, int(port)), _REACHED_S):  # Ray would wait for minutes
                pass
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"rollout.ray: a Ray cluster must be at {address!r}: {type(error).__name__}: {error}; {remedy}."
        ) from error
    finally:
        for number, handler in handlers.items():  # Ray replaces them, but on a signal a run saves a checkpoint
            with suppress(ValueError):  # raised outside the main thread
                signal.signal(number, handler)
    return ray


def check_room(nodes: Sequence[Mapping[str, Any]], plan: RayPlan) -> None:
    """Raises ConfigError if the cluster's nodes (``ray.nodes()``) could not hold all servers even when idle."""
    nodes = [node["Resources"] for node in nodes if node["Alive"]]
    wanted = {name: count for name, count in plan.resources.items() if count}
    most = len(nodes) * plan.engines
    places = sum(min((int(node.get(name, 0) // n) for name, n in wanted.items()), default=most) for node in nodes)
    if places < plan.engines:
        found = [{name: node.get(name, 0) for name in wanted} for node in nodes]
        raise ConfigError(
            f"rollout.ray: the cluster at {plan.address} must have room for {plan.engines} engines of {wanted}: it has "
            f"for {places}, its nodes {found}; lower rollout.ray_engines, or set rollout.ray_resources."
        )


class _Server:
    """A Ray actor that runs a vLLM server on the resources of the actor, and ends it with itself."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        from llmrl.modules.llm.engines.vllm.compat import server_command

        host = require("ray", extra="ray", used_by="rollout.ray").util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            url = f"http://{host}:{free.getsockname()[1]}"
        output = tempfile.TemporaryFile("a+b")  # noqa: SIM115  stays open as long as the server
        words, variables = server_command(model, options, host=host, port=int(url.rpartition(":")[2]))
        self._server = ServerProcess(url, words, variables, output, strictly=True)
        self._server.start()

    def url(self) -> str | None:
        """The server's URL; None until it answers. Raises WorkerError, with the end of its log, if it has exited."""
        if (code := self._server.exitcode) is not None:
            raise WorkerError(self._server.last_lines(f"its vLLM server ended with code {code}:"))
        return self._server.url if self._server.answers() else None

    def stop(self) -> None:
        self._server.stop(_ENDING_S)


class RayServers:
    """Servers of ``model``, a folder or hub name that every node can read, on a cluster that `connect` returned.

    options  arguments of vLLM
    wait_s   timeout for all of them to answer
    urls     of the servers
    Raises   WorkerError, naming the actor, if a server exits before it answers, or is not placed in time
    """

    def __init__(self, ray: Any, plan: RayPlan, model: str, options: Mapping[str, Any], *, wait_s: float) -> None:
        self._ray, self._plan = ray, plan
        resources = dict(plan.resources)
        config = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
        actor_class = ray.remote(_Server).options(**config)
        self._actors = [actor_class.remote(model, dict(options)) for _ in range(plan.engines)]
        try:
            self.urls = self._wait(time.monotonic() + wait_s, wait_s)
        except BaseException:
            self.close()
            raise

    def _wait(self, end: float, wait_s: float) -> Sequence[str]:
        urls: dict[int, str] = {}
        while len(urls) < len(self._actors):
            # Poll all in turn, so that a server that exits is noticed while others still load.
            for number in [number for number in range(len(self._actors)) if number not in urls]:
                actor = self._actors[number]
                name = f"rollout.ray: engine {number} of {len(self._actors)} (Ray actor {actor._actor_id.hex()[:8]})"
                try:
                    url = self._ray.get(actor.url.remote(), timeout=max(_PERIOD_S, end - time.monotonic()))
                except self._ray.exceptions.GetTimeoutError as error:
                    raise WorkerError(
                        f"{name} must answer within {wait_s:g} s: Ray has not placed it, or it is still loading; `ray "
                        "status` shows free resources."
                    ) from error
                except self._ray.exceptions.RayError as error:
                    cause = getattr(error, "cause", None) or error
                    raise WorkerError(f"{name} must start: {cause}") from error
                if url is not None:
                    urls[number] = url
                elif time.monotonic() > end:
                    raise WorkerError(f"{name} must answer within {wait_s:g} s: raise parallel.timeout_s.")
            time.sleep(_PERIOD_S)
        return [urls[number] for number in range(len(self._actors))]

    def close(self) -> None:
        """Stops the servers and their actors; and the cluster, if this process started it."""
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError):
                stopping = [actor.stop.remote() for actor in self._actors]
                self._ray.wait(stopping, num_returns=len(stopping), timeout=_ENDING_S)
            for actor in self._actors:
                self._ray.kill(actor)
        if self._plan.address == "local":
            self._ray.shutdown()
