// A plot names the values of its points under the pointer, the finger or the arrow keys; a printed page is unfolded.
for (const plot of document.querySelectorAll("svg[data-tips]")) {
  const tips = JSON.parse(plot.dataset.tips);
  const add = (name) => plot.appendChild(document.createElementNS(plot.namespaceURI, name));
  const dot = add("circle"), label = add("text"), width = plot.viewBox.baseVal.width;
  let shown = -1;
  const show = (index) => {
    shown = index;
    for (const part of [dot, label]) part.setAttribute("class", index < 0 ? "tip none" : "tip");
    if (index < 0) return;
    const [x, y, text] = tips[index];
    for (const [key, value] of [["cx", x], ["cy", y], ["r", 4]]) dot.setAttribute(key, value);
    label.textContent = text;
    const room = label.getComputedTextLength() / 2 + 2;
    label.setAttribute("x", Math.min(Math.max(x, room), width - room));
    label.setAttribute("y", y < 50 ? y + 20 : y - 12);
  };
  const seek = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse());
    const far = tips.map(([x, y]) => Math.hypot(x - at.x, (y - at.y) / 3));
    show(far.indexOf(Math.min(...far)));
  };
  plot.addEventListener("pointermove", seek);
  plot.addEventListener("pointerdown", seek);
  plot.addEventListener("pointerleave", () => show(-1));
  plot.addEventListener("blur", () => show(-1));
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) { show((Math.max(shown, 0) + by + tips.length) % tips.length); event.preventDefault(); }
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
