// The few lines that pages gain with a script. Everything works without them.
"use strict";

// Times are written in the viewer's zone; UTC stays in the title.
const zoned = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" }); // 2026-11-24 02:44:44
function showTimes(root) {
  for (const element of root.querySelectorAll("time[datetime]")) {
    element.textContent = zoned.format(new Date(element.dateTime));
  }
}
showTimes(document);

// So are the marks of an axis of moments, which are as long as they were.
for (const mark of document.querySelectorAll("text[data-at]")) {
  const written = zoned.format(new Date(mark.dataset.at));
  mark.textContent = mark.textContent.includes(":") ? written.slice(11, 16) : written.slice(5, 10);
}

// A field for a moment takes the viewer's time; a hidden one sends UTC, unchanged where nothing was typed.
for (const field of document.querySelectorAll("input[data-utc]")) {
  const sent = Object.assign(document.createElement("input"), { type: "hidden", name: field.name, value: field.value });
  const at = new Date(field.value + "Z");
  field.removeAttribute("name");
  field.autocomplete = "off"; // the browser would put back what was typed before, and the hidden field's value not
  if (field.value && !isNaN(at)) field.value = zoned.format(at).replace(" ", "T").slice(0, field.value.length);
  field.addEventListener("input", () => {
    sent.value = field.value && new Date(field.value).toISOString().slice(0, 19);
  });
  field.after(sent);
}
for (const zone of document.querySelectorAll(".utc")) zone.remove();

// A click copies a text block.
for (const block of document.querySelectorAll("pre.copy")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.textContent);
    button.textContent = "Copied";
  });
  block.before(button);
}

// Traffic: a running batch is shown anew, a file fills the field beside it, and the playground's answer comes as it is made.
const reloading = document.querySelector("[data-reload]");
if (reloading) {
  setInterval(async () => {
    if (document.hidden) return;
    const answer = await fetch(location.href);
    const fresh = answer.ok && new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(reloading.id);
    if (!fresh) return;
    if (!fresh.dataset.reload) return location.reload();
    showTimes(fresh);
    document.getElementById(reloading.id).replaceWith(document.adoptNode(fresh));
  }, Number(reloading.dataset.reload));
}

for (const field of document.querySelectorAll("textarea[data-file]")) {
  const label = document.createElement("label");
  const input = Object.assign(document.createElement("input"), { type: "file" });
  input.addEventListener("change", async () => { field.value = await input.files[0].text(); });
  label.append(field.dataset.file + " ", input);
  field.closest("label").after(label);
}

const asking = document.querySelector("form[data-stream]");
asking?.addEventListener("submit", async (event) => {
  if (event.submitter?.hasAttribute("formaction")) return;
  event.preventDefault();
  const [section, text, facts] = ["answer", "answer-text", "answer-facts"].map((id) => document.getElementById(id));
  const fields = new URLSearchParams(new FormData(asking));
  const button = asking.querySelector("button");
  section.hidden = false;
  button.disabled = true;
  text.textContent = facts.textContent = "";
  const began = performance.now();
  let firstMs = null;
  try {
    const answer = await fetch(asking.dataset.stream, { method: "POST", body: fields, headers: { "x-form-token": fields.get("form_token") } });
    if (!answer.ok) {
      const refusal = await answer.json().catch(() => null);
      throw new Error(refusal?.error?.message ?? "This did not work. Reload the page and try again.");
    }
    let rest = "";
    for (const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const chunk = JSON.parse(line.slice(6));
        if (chunk.error) throw new Error(chunk.error.message);
        const more = chunk.choices?.[0]?.delta?.content;
        if (more) firstMs ??= performance.now() - began;
        text.textContent += more ?? "";
        if (chunk.usage) showFacts(facts, chunk, firstMs, performance.now() - began);
      }
    }
  } catch (error) {
    facts.textContent = error.message;
  }
  button.disabled = false;
});

function showFacts(place, chunk, firstMs, totalMs) {
  const { usage, headgate } = chunk;
  const cost = (headgate.charge_micro_units / 1e6).toFixed(6);
  const first = firstMs === null ? "" : `First token after ${Math.round(firstMs)} ms, `;
  place.textContent = `${first}${(totalMs / 1000).toFixed(2)} s in all; prompt ${usage.prompt_tokens} tokens, ` +
    `${usage.prompt_tokens_details.cached_tokens} of them from the cache; output ${usage.completion_tokens} tokens; ${cost} ${headgate.currency}. `;
  const link = Object.assign(document.createElement("a"), { textContent: "The request", href: asking.dataset.requests + headgate.request_id });
  place.append(link);
}
