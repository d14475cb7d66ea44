"""Ollama's requests about models: served ones are listed; with `--manage-models` others are downloaded and deleted."""

import hashlib
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from auraflux.serve.failures import Failure
from auraflux.serve.listing import Listing
from auraflux.serve.ollama.lines import NDJSON, LineStream, error_line, timestamp
from auraflux.serve.ollama.pull import Downloads
from auraflux.serve.ollama.requests import capabilities
from auraflux.serve.ollama.schema import Models, NameRequest, OllamaError, Progress, PullRequest, ShownModel, Version
from auraflux.serve.operation import Endpoint, Operation
from auraflux.serve.services import Services
from auraflux.serve.transport.body import read_body
from auraflux.weights.download.local_models import remove

# clients refuse servers that look old to them: GitHub Copilot those before 0.6.4, others those before 0.14.2
API_VERSION = "0.14.3"
# a model that is not unloaded
NEVER = "2318-01-01T00:00:00Z"
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def routes(services: Services, manage: bool) -> list[Route]:
    """Return the routes about models; without `manage`, clients may neither download nor delete any."""
    downloads = Downloads()

    async def version(request: Request) -> Response:
        return JSONResponse({"version": API_VERSION})

    async def tags(request: Request) -> Response:
        modified = timestamp(services.created)
        return JSONResponse({"models": [{**_listed(each), "modified_at": modified} for each in await services.listings()]})

    async def running(request: Request) -> Response:
        return JSONResponse({"models": [_running(each) for each in await services.listings() if each.loaded is not None]})

    async def show(request: Request) -> Response:
        body = await read_body(request, NameRequest, services.limits)
        return JSONResponse(_shown(await services.listing(_named(body)), services.created))

    async def pull(request: Request) -> Response:
        body = await read_body(request, PullRequest, services.limits)
        name = _named(body)
        if services.knows(name):
            steps = downloads.present()
        elif manage:
            steps = downloads.fetch(name)
        else:
            raise await _not_allowed(services, "download")
        if body.stream is not False:
            return LineStream(steps, [], error_line, services.limits.idle_s)
        async for _ in steps:
            pass
        return JSONResponse({"status": "success"})

    async def delete(request: Request) -> Response:
        body = await read_body(request, NameRequest, services.limits)
        name = _named(body)
        if not manage:
            raise await _not_allowed(services, "delete")
        if services.knows(name):
            raise Failure(400, f"The model {name!r} is being served; stop the server before you delete it.")
        paths = [each.path for each in await services.listings() if each.path is not None]
        if not remove(name.removesuffix(":latest"), paths):
            raise Failure(404, f"There is no downloaded model {name[:200]!r}.")
        return JSONResponse({"status": "success"})

    described: list[tuple[str, str, Endpoint, str, type[BaseModel] | None, type[BaseModel]]] = [
        ("GET", "/api/version", version, "Return the version of Ollama's API.", None, Version),
        ("GET", "/api/tags", tags, "List the models (Ollama).", None, Models),
        ("GET", "/api/ps", running, "List the loaded models (Ollama).", None, Models),
        ("POST", "/api/show", show, "Describe a model (Ollama).", NameRequest, ShownModel),
        ("DELETE", "/api/delete", delete, "Delete a downloaded model (Ollama).", NameRequest, Progress),
    ]
    about: dict[str, Any] = {"error": OllamaError, "statuses": (503,)}
    return [
        *(
            Operation(path, endpoint, summary=summary, request=request, response=response, method=method, **about)
            for method, path, endpoint, summary, request, response in described
        ),
        Operation(
            "/api/pull",
            pull,
            summary="Download a model (Ollama).",
            request=PullRequest,
            response=Progress,
            streams=NDJSON,
            error=OllamaError,
            statuses=(502, 503),
        ),
    ]


def _named(body: NameRequest) -> str:
    if not body.given:
        raise Failure(400, "model is missing: give the name of a model.", param="model")
    return body.given


async def _not_allowed(services: Services, action: str) -> Failure:
    message = f"Clients may not {action} models here: start the server with --manage-models. The served model: "
    return Failure(403, f"{message}{', '.join(each.name for each in await services.listings())}.", code="not_allowed")


def _listed(model: Listing) -> dict[str, Any]:
    # clients look a model up by its name with a tag
    name = model.name if ":" in model.name else f"{model.name}:latest"
    size = model.headers.nbytes if model.headers else 0
    digest = hashlib.sha256(f"{model.name} {size}".encode()).hexdigest()
    return {"name": name, "model": name, "size": size, "digest": digest, "details": _details(model)}


def _running(model: Listing) -> dict[str, Any]:
    listed, loaded = _listed(model), model.loaded
    assert loaded is not None, "only loaded models run"
    size = loaded.nbytes or listed["size"]
    expires = NEVER if loaded.expires_at is None else timestamp(loaded.expires_at)
    on_gpu = size if loaded.device.startswith("cuda") else 0
    return {**listed, "size": size, "expires_at": expires, "size_vram": on_gpu, "context_length": model.context}


def _details(model: Listing) -> dict[str, Any]:
    headers = model.headers
    return {
        "parent_model": "",
        "format": "gguf" if headers and headers.form == "gguf" else "safetensors",
        "family": model.model_type,
        "families": [model.model_type],
        "parameter_size": _count(headers.parameters) if headers and headers.parameters else "unknown",
        "quantization_level": next(iter(headers.formats), "unknown").upper() if headers else "unknown",
    }


def _count(parameters: int) -> str:
    size, unit = next(((size, unit) for size, unit in UNITS if parameters >= size), (1, ""))
    return f"{parameters / size:.1f}{unit}"


def _shown(model: Listing, created: int) -> dict[str, Any]:
    kind = model.model_type
    info: dict[str, Any] = {"general.architecture": kind, "general.basename": model.name}
    if model.context is not None:
        info[f"{kind}.context_length"] = model.context
    if model.loaded is not None:
        info[f"{kind}.vocab_size"] = model.loaded.vocab
    if model.headers and model.headers.parameters:
        info["general.parameter_count"] = model.headers.parameters
    settings = model.default_sampling.settings if model.default_sampling else {}
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in settings.items()),
        "template": (model.templates or {}).get("default", ""),
        "details": _details(model),
        "model_info": info,
        "capabilities": capabilities(model),
        "modified_at": timestamp(created),
    }
