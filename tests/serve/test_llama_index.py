"""LlamaIndex's own class for servers like OpenAI's, in an environment of its own: it needs an older openai package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auraflux.serve.app import make_app
from auraflux.serve.auth import Access
from auraflux.serve.service import Service
from tests.serve.fake_link import NAME, FakeLink, serving

PACKAGE = "llama-index-llms-openai-like==0.8.1"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
SCRIPT = """
import asyncio, json, sys
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

def weather(place: str) -> str:
    "Return the weather of a place."
    return f"rain in {place}"

class Trip(BaseModel):
    "A journey."
    place: str
    days: int

options = dict(model=sys.argv[2], api_base=sys.argv[1], api_key="sk", is_chat_model=True, max_retries=0, context_window=4096)
llm = OpenAILike(**options, is_function_calling_model=True)
shaped = OpenAILike(**options, should_use_structured_outputs=True)
hello = [ChatMessage(role="user", content="hello")]
found = {
    "chat": llm.chat(hello).message.content,
    "streamed": "".join(part.delta or "" for part in llm.stream_chat(hello)),
    "complete": llm.complete("hello").text,
    "asynchronous": asyncio.run(llm.acomplete("hello")).text,
}
print(json.dumps({"step": "tools"}), flush=True)
sys.stdin.readline()
[call] = llm.get_tool_calls_from_response(llm.chat_with_tools([FunctionTool.from_defaults(weather)], "Will it rain?"))
found["call"] = [call.tool_name, call.tool_kwargs]
print(json.dumps({"step": "schema"}), flush=True)
sys.stdin.readline()
found["trip"] = shaped.as_structured_llm(Trip).chat(hello).raw.model_dump()
print(json.dumps(found), flush=True)
"""


@pytest.mark.slow
def test_llama_index(tmp_path: Path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    installed = subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGE], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"pip cannot install {PACKAGE}: {installed.stderr.strip()[-200:]}")
    link = FakeLink()
    link.play("Hello there!")
    with serving(make_app(Service(link), Access(keys=("sk",)))) as url:
        command = [python, "-c", SCRIPT, f"{url}/v1", NAME]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"no_proxy": "*"}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            for step, text in (("tools", CALL), ("schema", '{"place": "Bonn", "days": 2}')):
                line = client.stdout.readline()
                assert line, client.stderr.read() if client.stderr else ""
                assert json.loads(line)["step"] == step
                link.play(text)
                client.stdin.write("\n")
                client.stdin.flush()
            found = json.loads(client.stdout.readline())
            client.stdin.close()
            assert client.wait(60) == 0
    hello = "Hello there!"
    assert {found[name] for name in ("chat", "streamed", "complete", "asynchronous")} == {hello}
    assert found["call"] == ["weather", {"place": "Bonn"}]
    assert found["trip"] == {"place": "Bonn", "days": 2}
    assert link.requests[-1].sampling.grammar
