// The page's script in Node, on as little of a browser as it asks for: `node page_dom.js page.html` runs it, zooms,
// changes the theme, and prints what was drawn.
const fs = require("fs");
const vm = require("vm");
const html = fs.readFileSync(process.argv[2], "utf8");
const data = html.match(/<script id="data" type="application\/json">([\s\S]*?)<\/script>/)[1];
const script = html.match(/<script>\n([\s\S]*?)\n<\/script>\n<\/body>/)[1];
const counts = { rects: 0, texts: [], paths: 0 };

class Node {
  constructor(name) {
    Object.assign(this, { name, children: [], attributes: {}, listeners: {}, style: {}, dataset: {}, text: "" });
    this.classList = { toggle() {} };
    this.clientWidth = 1100;
  }
  appendChild(node) { this.children.push(node); return node; }
  setAttribute(key, value) {
    if (String(value).includes("NaN")) throw new Error(`${this.name} ${key} = ${value}`);
    this.attributes[key] = String(value);
    if (this.name === "path") counts.paths++;
  }
  getAttribute(key) { return this.attributes[key] === undefined ? null : this.attributes[key]; }
  removeAttribute(key) { delete this.attributes[key]; }
  addEventListener(kind, act) { this.listeners[kind] = act; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 1100, height: 500 }; }
  setPointerCapture() {}
  get firstChild() { return this.children[0]; }
  set textContent(value) { this.text = String(value); this.children = []; counts.texts.push(this.text); }
  get textContent() { return this.text; }
  getContext() {
    return new Proxy({}, { get: (_, key) => (key === "fillRect" ? () => { counts.rects++; } : () => {}), set: () => true });
  }
  find(name) { return this.name === name ? this : this.children.map((c) => c.find(name)).find(Boolean); }
}

const ids = {};
for (const id of ["data", "main", "lead", "theme", "tip"]) ids[id] = new Node(id);
ids.data.text = data;
const document = {
  documentElement: new Node("html"), body: new Node("body"), createElement: (name) => new Node(name),
  createElementNS: (_, name) => new Node(name), getElementById: (id) => ids[id],
};
const window = {
  matchMedia: () => ({ matches: false, addEventListener() {} }), addEventListener() {}, innerWidth: 1200, devicePixelRatio: 1,
};
const began = Date.now();
vm.runInNewContext(script, { document, window, getComputedStyle: () => ({ getPropertyValue: () => "#123456" }) });
const canvas = ids.main.find("canvas");
const seen = { drawn: Number(canvas.dataset.drawn), view: canvas.dataset.view };
for (let i = 0; i < 20; i++) canvas.listeners.wheel({ preventDefault() {}, deltaY: -100, clientX: 300, clientY: 60 });
seen.zoomed = canvas.dataset.view;
canvas.listeners.pointermove({ clientX: 300, clientY: 60 });
canvas.listeners.keydown({ key: "ArrowRight", preventDefault() {} });
seen.moved = canvas.dataset.view;
canvas.listeners.dblclick();
seen.whole = canvas.dataset.view;
ids.theme.listeners.click();
seen.theme = document.documentElement.getAttribute("data-theme");
console.log(JSON.stringify({ ...seen, ...counts, ready: document.documentElement.getAttribute("data-ready"),
  milliseconds: Date.now() - began }));
