"""Ollama's requests about models: the served one is listed; with `--manage-models` others are downloaded and deleted."""

import hashlib
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from auraflux.serve.failures import Failure
from auraflux.serve.ollama.lines import NDJSON, LineStream, error_line, timestamp
from auraflux.serve.ollama.pull import Downloads
from auraflux.serve.ollama.requests import capabilities
from auraflux.serve.ollama.schema import Models, NameRequest, OllamaError, Progress, PullRequest, ShownModel, Version
from auraflux.serve.operation import Endpoint, Operation
from auraflux.serve.service import Service
from auraflux.serve.transport.body import read_body
from auraflux.weights.download.local_models import remove

# clients refuse servers that look old to them: GitHub Copilot those before 0.6.4, others those before 0.14.2
API_VERSION = "0.14.3"
# the served model stays loaded, whatever `keep_alive` says
NEVER = "2318-01-01T00:00:00Z"
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def routes(service: Service, manage: bool) -> list[Route]:
    """Return the routes about models; without `manage`, clients may neither download nor delete any."""
    downloads = Downloads()

    async def version(request: Request) -> Response:
        return JSONResponse({"version": API_VERSION})

    async def tags(request: Request) -> Response:
        return JSONResponse({"models": [{**_listed(service), "modified_at": timestamp(service.created)}]})

    async def running(request: Request) -> Response:
        facts = service.facts
        listed = _listed(service)
        on_gpu = listed["size"] if facts.device.startswith("cuda") else 0
        more = {"expires_at": NEVER, "size_vram": on_gpu, "context_length": facts.context}
        return JSONResponse({"models": [{**listed, **more}]})

    async def show(request: Request) -> Response:
        body = await read_body(request, NameRequest, service.limits)
        service.check_model(_named(body))
        return JSONResponse(_shown(service))

    async def pull(request: Request) -> Response:
        body = await read_body(request, PullRequest, service.limits)
        name = _named(body)
        if service.serves(name):
            steps = downloads.present()
        elif manage:
            steps = downloads.fetch(name)
        else:
            raise _not_allowed(service, "download")
        if body.stream is not False:
            return LineStream(steps, [], error_line, service.limits.idle_s)
        async for _ in steps:
            pass
        return JSONResponse({"status": "success"})

    async def delete(request: Request) -> Response:
        body = await read_body(request, NameRequest, service.limits)
        name = _named(body)
        if not manage:
            raise _not_allowed(service, "delete")
        if service.serves(name):
            raise Failure(400, f"The model {name!r} is being served; stop the server before you delete it.")
        if not remove(name.removesuffix(":latest"), service.facts.path):
            raise Failure(404, f"There is no downloaded model {name[:200]!r}.")
        return JSONResponse({"status": "success"})

    described: list[tuple[str, str, Endpoint, str, type[BaseModel] | None, type[BaseModel]]] = [
        ("GET", "/api/version", version, "Return the version of Ollama's API.", None, Version),
        ("GET", "/api/tags", tags, "List the served model (Ollama).", None, Models),
        ("GET", "/api/ps", running, "List the loaded model (Ollama).", None, Models),
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


def _not_allowed(service: Service, action: str) -> Failure:
    message = f"Clients may not {action} models here: start the server with --manage-models. The served model: "
    return Failure(403, f"{message}{service.facts.name}.", code="not_allowed")


def _listed(service: Service) -> dict[str, Any]:
    facts = service.facts
    # clients look a model up by its name with a tag
    name = facts.name if ":" in facts.name else f"{facts.name}:latest"
    size = facts.headers.nbytes if facts.headers else 0
    digest = hashlib.sha256(f"{facts.name} {size}".encode()).hexdigest()
    return {"name": name, "model": name, "size": size, "digest": digest, "details": _details(service)}


def _details(service: Service) -> dict[str, Any]:
    facts, headers = service.facts, service.facts.headers
    return {
        "parent_model": "",
        "format": "gguf" if headers and headers.form == "gguf" else "safetensors",
        "family": facts.model_type,
        "families": [facts.model_type],
        "parameter_size": _count(headers.parameters) if headers and headers.parameters else "unknown",
        "quantization_level": next(iter(headers.formats), "unknown").upper() if headers else "unknown",
    }


def _count(parameters: int) -> str:
    size, unit = next(((size, unit) for size, unit in UNITS if parameters >= size), (1, ""))
    return f"{parameters / size:.1f}{unit}"


def _shown(service: Service) -> dict[str, Any]:
    facts, kind = service.facts, service.facts.model_type
    tokenizer = service.link.tokenizer
    info = {
        "general.architecture": kind,
        "general.basename": facts.name,
        f"{kind}.context_length": facts.context,
        f"{kind}.vocab_size": facts.vocab,
    }
    if facts.headers and facts.headers.parameters:
        info["general.parameter_count"] = facts.headers.parameters
    settings = facts.default_sampling.settings
    return {
        "modelfile": f"FROM {facts.name}\n",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in settings.items()),
        "template": tokenizer.templates.get("default", "") if tokenizer else "",
        "details": _details(service),
        "model_info": info,
        "capabilities": capabilities(service),
        "modified_at": timestamp(service.created),
    }
