"""`auraflux serve --ray`: replicas of the server behind one address, as an application of Ray Serve.

`application` makes it, here and for Serve's config files, whose `args` are the options of `auraflux serve`.
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

from auraflux.cli.serve_options import front_settings, parsed
from auraflux.cli.served_model import open_desk
from auraflux.errors import BackendError, InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.serve.front import FrontSettings

log = logging.getLogger("auraflux")
NAME = "auraflux"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
ADDRESS, CLUSTER = "RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
COUNTS = re.compile(r"([1-9]\d{0,3})(?:-([1-9]\d{0,3}))?")
# seconds between two looks at a replica, and those it may take to answer
HEALTH_S, ANSWER_S = 5.0, 15.0
REPLICAS = [
    click.option(
        "--ray", "on_ray", is_flag=True, help="Serve replicas of the model on Ray Serve: pip install 'auraflux[ray]'."
    ),
    click.option(
        "--replicas",
        default="1",
        show_default=True,
        metavar="N",
        help="Copies of the model with --ray; MIN-MAX, such as 1-4, for as many as the requests that wait ask for.",
    ),
]


def application(args: Mapping[str, Any]) -> Any:
    """Make the application of options as a config file has them: model: NAME, kv: k4v4, parallel: 4, replicas: 1-4."""
    given = {name.replace("_", "-"): value for name, value in args.items()}
    model, replicas = given.pop("model", None), given.pop("replicas", "1")
    chosen = parsed([*([] if model is None else [str(model)]), *_words(given)])
    settings = front_settings(chosen.pop("host"), chosen.pop("log_json"), chosen)
    return _application(chosen.pop("model"), str(replicas), settings, chosen)


def _words(given: Mapping[str, Any]) -> list[str]:
    """Options as they are written on a command line."""
    found: list[str] = []
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                found.append(f"--{name}")
            elif each is not False and each is not None:
                found += [f"--{name}", str(each)]
    return found


def _application(model: str | None, replicas: str, settings: "FrontSettings", chosen: dict[str, Any]) -> Any:
    serve = _serve()
    if chosen["prefix_disk"] is not None:
        raise SettingsError("--prefix-disk is for one server: replicas would write to one folder.")
    least, most = _counts(replicas)
    cuda = chosen["device"].startswith("cuda")
    # a replica takes as many requests as it writes texts; those that wait do so at the door, and go where there is room first
    texts = chosen["parallel"] or (64 if cuda else 8)
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from auraflux.serve.replicas.door import Door

    router: dict[str, Any] = {"request_router_class": ROUTER}
    scaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scaling = {
            "autoscaling_config": AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=texts)
        }
    copies = serve.deployment(
        _Loaded,
        name="Model",
        max_ongoing_requests=texts,
        max_queued_requests=settings.waiting,
        request_router_config=RequestRouterConfig(**router),
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=ANSWER_S,
        graceful_shutdown_timeout_s=settings.grace_s,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(cuda)},
        **scaling,
    )
    # an update replaces it too, and what it is passing on must come to its end
    ends: dict[str, Any] = {"graceful_shutdown_timeout_s": settings.grace_s}
    door = serve.deployment(Door, name="Door", max_ongoing_requests=1 << 20, ray_actor_options={"num_cpus": 0}, **ends)
    return door.bind(copies.bind(model, settings, {**chosen, "parallel": texts}), settings.limits)


class _Loaded:
    """A replica as Serve makes, asks and ends it."""

    async def __init__(self, model: str | None, settings: "FrontSettings", chosen: dict[str, Any]):  # type: ignore[misc]
        from auraflux.serve.replicas.door import listen_on_this_node_only
        from auraflux.serve.replicas.replica import Replica

        listen_on_this_node_only()
        self._made = Replica(partial(_answer, model, chosen), settings, steady=chosen["restart"])
        await self._made.start()

    async def answer(self, asked: Any) -> AsyncIterator[Any]:
        async for part in self._made.answer(asked):
            yield part

    async def whole(self, asked: Any) -> Any:
        return await self._made.whole(asked)

    def check_health(self) -> None:
        self._made.check_health()

    async def __del__(self) -> None:
        await self._made.close()


def _answer(model: str | None, chosen: dict[str, Any], connection: Connection) -> None:
    """Run a replica's model until nobody is at the other end."""
    from auraflux.serve.front import set_up_log

    set_up_log(False)
    # who ends the replica ends this process, by closing the pipe
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    open_desk(model, connection, chosen).run()


def _counts(replicas: str) -> tuple[int, int]:
    found = COUNTS.fullmatch(replicas)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if most < least:
        raise SettingsError(f"{replicas!r:.40} is no number of replicas. Write it like 2, or 1-4 for as many as are needed.")
    return least, most


def _serve() -> Any:
    try:
        from ray import serve
    except ImportError as err:
        raise BackendError("ray is not installed. Replicas need: pip install 'auraflux[serve,ray]'.") from err
    return serve


def run_replicas(
    model: str | None, host: str, port: int, replicas: str, settings: "FrontSettings", chosen: dict[str, Any]
) -> None:
    """Serve replicas until told to stop: on the Ray cluster that $RAY_ADDRESS names, or on one of this machine."""
    if not os.environ.get(ADDRESS):
        # nothing of a Ray of this machine is reached from others; it reads this when it is imported
        os.environ[CLUSTER] = "0"
    serve = _serve()
    made = _application(model, replicas, settings, chosen)
    port = port or _free_port(host)
    stopped = threading.Event()
    _join_ray(_counts(replicas)[1])
    # after Ray has set its own
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    from ray.serve import RunTarget, run_many

    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("listening on %s (process %d); %s replicas are being loaded", where, os.getpid(), replicas)
        # `serve.run` would not hear of a signal before all replicas are loaded
        run_many([RunTarget(made, name=NAME)], wait_for_applications_running=False)
        _await(serve, stopped)
        if not stopped.is_set():
            log.info("ready: %s replicas, OpenAI's clients %s/v1, Anthropic's %s", replicas, where, where)
        stopped.wait()
    finally:
        import ray

        serve.shutdown()
        ray.shutdown()


def _await(serve: Any, stopped: threading.Event) -> None:
    """Wait until replicas answer."""
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
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
            return int(held.getsockname()[1])
    except OSError as err:
        raise InputError(f"cannot listen on {host}: {err.strerror or err}.") from err
