// Shows the OpenAPI document of this gateway, and loads nothing else from the network.

const METHODS = ["get", "post", "put", "patch", "delete"];

/** Create an element with attributes and children; texts are never parsed as HTML. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== undefined && child !== ""));
  return made;
}

/** Render a text with `code` between backticks. */
function prose(text) {
  return (text ?? "").split("`").map((part, at) => (at % 2 ? element("code", {}, part) : part));
}

const idOf = (method, path) => `${method}-${path}`.replace(/[^A-Za-z0-9]+/g, "-").replace(/-$/, "");
const typeIdOf = (name) => `type-${name}`;
const nameOf = (reference) => reference.split("/").pop();

/** Describe a schema briefly, with links to named types. */
function typeOf(schema) {
  if (schema === undefined || schema === true) return ["anything"];
  if (schema.$ref) {
    const name = nameOf(schema.$ref);
    return [element("a", { href: `#${typeIdOf(name)}` }, name)];
  }
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return options.flatMap((option, at) => (at ? [" | ", ...typeOf(option)] : typeOf(option)));
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" | ")];
  if (schema.type === "array") return ["array of ", ...typeOf(schema.items)];
  const types = [schema.type ?? "anything"].flat().join(" | ");
  const least = schema.minimum ?? schema.exclusiveMinimum;
  const most = schema.maximum ?? schema.exclusiveMaximum;
  if (least === undefined && most === undefined) return [types];
  return [`${types}, ${least ?? "…"} to ${most ?? "…"}`];
}

function table(headings, rows) {
  const head = element("tr", {}, headings.map((heading) => element("th", { scope: "col" }, heading)));
  const lines = rows.map((cells) => element("tr", {}, cells.map((cell) => element("td", {}, cell))));
  // Focusable, so that the keyboard can scroll it.
  const made = element("table", {}, element("thead", {}, head), element("tbody", {}, lines));
  return element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `Table of each ${headings[0]}` }, made);
}

function fields(schema, schemas) {
  const described = schema?.$ref ? schemas[nameOf(schema.$ref)] : schema;
  const properties = Object.entries(described?.properties ?? {});
  if (!properties.length) return [];
  const needed = new Set(described.required ?? []);
  const rows = properties
    .sort(([one], [other]) => needed.has(other) - needed.has(one))
    .map(([name, field]) => [
      [element("code", {}, name), needed.has(name) ? element("span", { class: "needed" }, " required") : ""],
      typeOf(field),
    ]);
  return [table(["field", "type"], rows)];
}

/** Return a command to paste; it reads the key from the environment. */
function curl(method, path, body, isForm) {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const lines = [`curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${base}${path}`];
  if (!path.startsWith("/health") && path !== "/version") {
    const key = path.startsWith("/admin") ? "PARROT_ADMIN_KEY" : "PARROT_API_KEY";
    lines.push(`-H "Authorization: Bearer $${key}"`);
  }
  if (isForm) lines.push("-F purpose=batch", "-F file=@lines.jsonl");
  else if (body !== undefined) {
    lines.push("-H 'Content-Type: application/json'");
    lines.push(`-d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`);
  }
  return lines.join(" \\\n  ");
}

function example(text) {
  const copy = element("button", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const shown = element("pre", { tabindex: "0", "aria-label": "Example" }, element("code", {}, text));
  // Without https a page may not write to the clipboard.
  return navigator.clipboard ? [shown, copy] : [shown];
}

function bodyOf(method, path, operation, schemas) {
  const body = element("div", { class: "body" }, element("p", {}, prose(operation.description)));
  const part = (title, ...content) => body.append(element("h3", {}, title), ...content.flat());
  const content = operation.requestBody?.content ?? {};
  const [kind, described] = Object.entries(content)[0] ?? [];
  part("Example", example(curl(method, path, described?.example ?? (kind === "application/json" ? {} : undefined),
    kind === "multipart/form-data")));
  if (described) {
    const found = fields(described.schema, schemas);
    if (found.length) part(`Body (${kind})`, found);
  }
  const parameters = operation.parameters ?? [];
  if (parameters.length) {
    part("Parameters", table(
      ["name", "in", "meaning"],
      parameters.map((each) => [
        [element("code", {}, each.name), each.required ? element("span", { class: "needed" }, " required") : ""],
        each.in,
        [...typeOf(each.schema), each.description ? " · " : "", ...prose(each.description)],
      ]),
    ));
  }
  part("Answers", table(["status", "meaning", "content"], Object.entries(operation.responses).map(
    ([status, answer]) => [
      element("code", {}, status),
      prose(answer.description),
      Object.entries(answer.content ?? {}).flatMap(([type, { schema }], at) => [
        at ? element("br") : "", type, schema?.$ref ? [": ", ...typeOf(schema)] : "",
      ].flat()),
    ],
  )));
  return body;
}

/** Create a details element whose body is built when it is first opened. */
function folded(id, name, summary, make) {
  const made = element("details", { class: name, id }, element("summary", {}, summary));
  made.addEventListener("toggle", () => {
    if (made.open && made.children.length === 1) made.append(make());
  });
  return made;
}

function show(document_) {
  document.getElementById("version").textContent = document_.info.version;
  const main = document.getElementById("main");
  const list = document.getElementById("routes");
  const schemas = document_.components?.schemas ?? {};
  const groups = new Map((document_.tags ?? []).map(({ name, description }) => [name, { description, routes: [] }]));
  for (const [path, operations] of Object.entries(document_.paths)) {
    for (const method of METHODS.filter((each) => operations[each])) {
      const [tag] = operations[method].tags ?? ["other"];
      if (!groups.has(tag)) groups.set(tag, { description: "", routes: [] });
      groups.get(tag).routes.push({ method, path, operation: operations[method] });
    }
  }
  const searched = [];
  for (const [tag, { description, routes }] of groups) {
    if (!routes.length) continue;
    const section = element("section", {}, element("h2", {}, tag), element("p", {}, prose(description)));
    const links = element("ul");
    const group = element("div", {}, element("h2", {}, tag), links);
    for (const { method, path, operation } of routes) {
      const id = idOf(method, path);
      const item = folded(id, "route", [
        element("span", { class: `method ${method}` }, method.toUpperCase()),
        element("code", {}, path),
        element("span", { class: "text" }, prose(operation.summary)),
      ], () => bodyOf(method, path, operation, schemas));
      const link = element("li", {}, element("a", { href: `#${id}` },
        element("span", { class: `method ${method}` }, method.toUpperCase()), " ", element("span", {}, path)));
      links.append(link);
      section.append(item);
      const text = `${method} ${path} ${operation.summary} ${operation.description}`.toLowerCase();
      searched.push({ text, shown: [item, link], section, group });
    }
    main.append(section);
    list.append(group);
  }
  const types = element("section", {}, element("h2", {}, "Types"), element("p", {}, "Parts of bodies and answers."));
  for (const [name, schema] of Object.entries(schemas)) {
    const found = fields(schema, schemas);
    if (found.length) types.append(folded(typeIdOf(name), "type", element("code", {}, name), () =>
      element("div", { class: "body" }, element("p", {}, prose(schema.description)), found)));
  }
  main.append(types);

  document.getElementById("find").addEventListener("input", ({ target }) => {
    const words = target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const each of searched) {
      const matches = words.every((word) => each.text.includes(word));
      each.shown.forEach((item) => (item.hidden = !matches));
    }
    for (const parent of new Set(searched.flatMap(({ section, group }) => [section, group]))) {
      parent.hidden = !parent.querySelector("details:not([hidden]), li:not([hidden])");
    }
    types.hidden = words.length > 0;
  });
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) {
    target.open = true;
    target.scrollIntoView();
  }
}

const chosen = localStorage.getItem("parrot-theme");
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = chosen ?? (dark ? "dark" : "light");
addEventListener("hashchange", openTarget);
addEventListener("keydown", (event) => {
  if (event.key === "/" && !(event.target instanceof HTMLInputElement)) {
    event.preventDefault();
    document.getElementById("find").focus();
  }
});
const state = document.getElementById("state");
try {
  const answer = await fetch("openapi.json");
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  show(await answer.json());
  state.remove();
  openTarget();
} catch (error) {
  state.textContent = `The OpenAPI document cannot be read: ${error.message}`;
}
