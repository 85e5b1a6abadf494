// The few lines that pages gain with a script. Everything works without them.
"use strict";

// Times are written in the viewer's zone; UTC stays in the title.
const zoned = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
for (const element of document.querySelectorAll("time[datetime]")) {
  element.textContent = zoned.format(new Date(element.dateTime));
}

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

// What changes by itself is read again every two seconds while the page is looked at.
for (const element of document.querySelectorAll("[data-live]")) {
  setInterval(async () => {
    if (document.hidden) return;
    const answer = await fetch(location.href);
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const newer = page.getElementById(element.id);
    if (newer) element.replaceChildren(...newer.childNodes);
  }, 2000);
}
