"""A local Ray on which an application is deployed from a config, and redeployed for each further config.

Run as a program: every line of stdin is a config as JSON. The replica states are printed once a second, as JSON.
"""

import json
import logging
import os
import select
import sys
from typing import Any

# read when ray is imported: ray listens on loopback only
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

ATTEMPTS = 5


def main() -> None:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    _start(ray)
    started = False
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 1.0)
        if ready:
            line = sys.stdin.readline()
            if not line:
                break
            config = ServeDeploySchema.model_validate(json.loads(line))
            if not started:
                options = config.http_options
                serve.start(proxy_location="HeadOnly", http_options={"host": options.host, "port": options.port})
                started = True
            # private: Ray's public way to deploy a config is the dashboard's REST API, and no dashboard runs here
            _get_global_client().deploy_apps(config)
        if started:
            print(json.dumps(_status(serve)), flush=True)
    serve.shutdown()
    ray.shutdown()


def _start(ray: Any) -> None:
    """Start Ray, with retries for a machine too busy for Ray's 30 s timeout."""
    for left in range(ATTEMPTS - 1, -1, -1):
        try:
            ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.WARNING)
            return
        except Exception as err:
            if not left or "timed out" not in str(err):
                raise
            ray.shutdown()


def _status(serve: Any) -> dict[str, Any]:
    found = serve.status().applications.get("auraflux")
    if found is None:
        return {"status": "NONE", "Model": {}}
    return {"status": str(found.status.value), **{name: dict(each.replica_states) for name, each in found.deployments.items()}}


if __name__ == "__main__":
    main()
