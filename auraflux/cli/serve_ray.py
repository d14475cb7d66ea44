"""`auraflux serve --ray`: replicas of the server behind one address, as an application of Ray Serve.

`application` builds it for the command line and for Serve's config files, whose `args` are the options of `auraflux serve`.
"""

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options.serve import front_settings, parsed
from auraflux.cli.options.served_model import open_model_process
from auraflux.errors import BackendError, InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.serve.transport.http_process import HttpSettings

log = logging.getLogger("auraflux")
NAME = "auraflux"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
ADDRESS, CLUSTER = "RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
COUNTS = re.compile(r"([1-9]\d{0,3})(?:-([1-9]\d{0,3}))?")
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 5.0, 15.0
REPLICAS = [
    click.option(
        "--ray", "on_ray", is_flag=True, help="Serve replicas of the model with Ray Serve; needs pip install 'ray[serve]'."
    ),
    click.option(
        "--replicas",
        default="1",
        show_default=True,
        metavar="N",
        help="With --ray: number of replicas, or MIN-MAX such as 1-4 to scale with the queue.",
    ),
]


def application(args: Mapping[str, Any]) -> Any:
    """Build the application from the options of a config file: model: NAME, kv: k4v4, max-sequences: 4, replicas: 1-4."""
    given = {name.replace("_", "-"): value for name, value in args.items()}
    model, replicas = given.pop("model", None), given.pop("replicas", "1")
    chosen = parsed([*([] if model is None else [str(model)]), *_words(given)])
    settings = front_settings(chosen.pop("host"), chosen.pop("log_json"), chosen)
    return _application(chosen.pop("model"), str(replicas), settings, chosen)


def _words(given: Mapping[str, Any]) -> list[str]:
    """Format options as command-line arguments."""
    found: list[str] = []
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                found.append(f"--{name}")
            elif each is not False and each is not None:
                found += [f"--{name}", str(each)]
    return found


def _application(model: str | None, replicas: str, settings: "HttpSettings", chosen: dict[str, Any]) -> Any:
    serve = _serve()
    if chosen["files"] is not None:
        raise SettingsError("--files is not supported with --ray: replicas would write to the same folder.")
    if chosen["prefix_disk"] is not None:
        raise SettingsError("--prefix-disk is not supported with --ray: replicas would write to the same folder.")
    least, most = _replica_range(replicas)
    cuda = chosen["device"].startswith("cuda")
    # a replica accepts one batch of requests; others queue at the router for the first replica with a free slot
    sequences = chosen["max_sequences"] or (64 if cuda else 8)
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from auraflux.serve.replicas.router import ReplicaRouter

    router: dict[str, Any] = {"request_router_class": ROUTER}
    scaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scaling = {
            "autoscaling_config": AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=sequences)
        }
    copies = serve.deployment(
        _RayReplica,
        name="Model",
        max_ongoing_requests=sequences,
        max_queued_requests=settings.waiting,
        request_router_config=RequestRouterConfig(**router),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=settings.grace_s,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(cuda)},
        **scaling,
    )
    # an update replaces the router too, after the responses it forwards have ended
    shutdown: dict[str, Any] = {"graceful_shutdown_timeout_s": settings.grace_s}
    router_deployment = serve.deployment(
        ReplicaRouter, name="ReplicaRouter", max_ongoing_requests=1 << 20, ray_actor_options={"num_cpus": 0}, **shutdown
    )
    return router_deployment.bind(copies.bind(model, settings, {**chosen, "max_sequences": sequences}), settings.limits)


class _RayReplica:
    """A replica with the lifecycle methods of Ray Serve."""

    async def __init__(self, model: str | None, settings: "HttpSettings", chosen: dict[str, Any]):  # type: ignore[misc]
        from auraflux.serve.replicas.node_port import bind_to_this_node
        from auraflux.serve.replicas.replica import Replica

        bind_to_this_node()
        self._replica = Replica(partial(_serve_model, model, chosen), settings, steady=chosen["restart"])
        await self._replica.start()

    async def respond(self, request: Any) -> AsyncIterator[Any]:
        async for batch in self._replica.respond(request):
            yield batch

    async def full_response(self, request: Any) -> Any:
        return await self._replica.full_response(request)

    def check_health(self) -> None:
        from auraflux.serve.replicas.node_port import check_bound

        check_bound()
        self._replica.check_health()

    async def __del__(self) -> None:
        await self._replica.close()


def _serve_model(model: str | None, chosen: dict[str, Any], connection: Connection) -> None:
    """Run a replica's model until its pipe is closed."""
    from auraflux.serve.transport.http_process import set_up_log

    set_up_log(False)
    # closing the pipe ends this process
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    open_model_process(model, connection, chosen).run()


def _replica_range(replicas: str) -> tuple[int, int]:
    found = COUNTS.fullmatch(replicas)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if most < least:
        raise SettingsError(f"{replicas!r:.40} is not a number of replicas. Write it like 2, or 1-4 to scale with the queue.")
    return least, most


def _serve() -> Any:
    try:
        from ray import serve
    except ImportError as err:
        raise BackendError("ray is not installed. Replicas need: pip install 'ray[serve]'.") from err
    return serve


def run_replicas(
    model: str | None, host: str, port: int, replicas: str, settings: "HttpSettings", chosen: dict[str, Any]
) -> None:
    """Serve replicas until a signal arrives, on the Ray cluster of $RAY_ADDRESS or on a local one."""
    if not os.environ.get(ADDRESS):
        # a local Ray must not be reachable from other machines; Ray reads this at import
        os.environ[CLUSTER] = "0"
    serve = _serve()
    made = _application(model, replicas, settings, chosen)
    port = port or _free_port(host)
    stopped = threading.Event()
    _join_ray(_replica_range(replicas)[1])
    # after Ray has installed its handlers
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    from ray.serve import RunTarget, run_many

    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("listening on %s (process %d); %s replicas are being loaded", where, os.getpid(), replicas)
        # `serve.run` would ignore signals until all replicas are loaded
        run_many([RunTarget(made, name=NAME)], wait_for_applications_running=False)
        _wait_until_running(serve, stopped)
        if not stopped.is_set():
            log.info("ready: %s replicas, OpenAI's clients %s/v1, Anthropic's %s", replicas, where, where)
        stopped.wait()
    finally:
        import ray

        serve.shutdown()
        ray.shutdown()


def _wait_until_running(serve: Any, stopped: threading.Event) -> None:
    """Wait until the application runs or a signal arrives."""
    while not stopped.wait(0.2):
        state = serve.status().applications[NAME]
        if state.status == "RUNNING":
            return
        if state.status == "DEPLOY_FAILED":
            raise BackendError(f"the replicas could not be started: {' '.join(state.message.split())[:600]}")


def _join_ray(most: int) -> None:
    import ray

    here: dict[str, Any] = {"num_cpus": max(os.cpu_count() or 1, most), "include_dashboard": False}
    ray.init(logging_level=logging.WARNING, **({} if os.environ.get(ADDRESS) else here))


def _free_port(host: str) -> int:
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            return int(probe.getsockname()[1])
    except OSError as err:
        raise InputError(f"cannot listen on {host}: {err.strerror or err}.") from err
