// Yields the server-sent events of a response as parsed JSON, up to `[DONE]`.

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const lines = (rest + (value ?? "")).split(/\r\n|\n|\r(?!$)/);
      rest = done ? "" : lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        } else if (line === "" && data.length) {
          const text = data.join("\n");
          data = [];
          if (text.startsWith("[DONE]")) return;
          yield JSON.parse(text);
        }
      }
      if (done) throw new Error("The connection was lost before the answer was complete.");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
