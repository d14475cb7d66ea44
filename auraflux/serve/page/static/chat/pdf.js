// Reads the text of PDF files with the vendored pdf.js, which is loaded with the first of them.

const NO_TEXT = "holds no text, perhaps only pictures of its pages. Add a picture, or copy its text into the message.";

// Return the text of a PDF; throw an error with a sentence for the user if there is none.
export async function pdfText(name, bytes) {
  const { getDocument, VerbosityLevel } = await library();
  const task = getDocument({ data: bytes, disableFontFace: true, verbosity: VerbosityLevel.ERRORS });
  try {
    const pages = await textOfPages(await task.promise);
    const text = pages.map((page) => page.trim()).filter(Boolean).join("\n\n");
    if (text) return text;
  } catch (error) {
    throw new Error(`${name} ${error.name === "PasswordException" ? "is protected by a password." : "is damaged, or no PDF."}`);
  } finally {
    await task.destroy();
  }
  throw new Error(`${name} ${NO_TEXT}`);
}

async function textOfPages(pdf) {
  const pages = [];
  for (let number = 1; number <= pdf.numPages; number++) {
    const page = await pdf.getPage(number);
    const { items } = await page.getTextContent();
    const text = items.map(({ str, hasEOL }) => (hasEOL ? `${str}\n` : str)).join("");
    // glyphs without a character
    pages.push(text.replaceAll("\0", ""));
    page.cleanup();
  }
  return pages;
}

// a worker that is imported runs on this thread: the page's policy refuses others
async function library() {
  await import("../vendor/pdf.worker.min.mjs");
  return import("../vendor/pdf.min.mjs");
}
