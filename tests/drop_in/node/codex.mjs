// Codex: `codex exec` with a tool of an MCP server; an answer of a schema.
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { z } from "zod";
import { BASE_URL, MODEL, ONLY_STRUCTURED, QUESTION, Weather, called, report } from "./common.mjs";

const folder = mkdtempSync(join(tmpdir(), "codex-"));
const inFolder = (name, text) => {
  writeFileSync(join(folder, name), text);
  return join(folder, name);
};
const calls = inFolder("calls", "");
const server = fileURLToPath(new URL("weather_server.mjs", import.meta.url));
const codex = join(
  dirname(createRequire(import.meta.url).resolve("@openai/codex/package.json")),
  "bin/codex.js",
);
// What a person writes into ~/.codex/config.toml.
inFolder(
  "config.toml",
  `
model = "${MODEL}"
model_provider = "gateway"
web_search = "disabled"

[model_providers.gateway]
name = "gateway"
base_url = "${BASE_URL}"
wire_api = "responses"

[mcp_servers.weather]
command = ${JSON.stringify(process.execPath)}
args = ${JSON.stringify([server, calls])}
default_tools_approval_mode = "approve"
`,
);

function ask(...options) {
  const last = join(folder, "last");
  const asked = [codex, "exec", "--skip-git-repo-check", "-C", folder, "-o", last, ...options];
  const { status, stderr } = spawnSync(process.execPath, [...asked, QUESTION], {
    env: { ...process.env, CODEX_HOME: folder },
    stdio: ["ignore", "inherit", "pipe"],
    encoding: "utf-8",
  });
  if (status !== 0) throw new Error(stderr);
  return readFileSync(last, "utf-8");
}

try {
  const text = ONLY_STRUCTURED ? "" : ask();
  called.push(...readFileSync(calls, "utf-8").split("\n").filter(Boolean));
  const schema = inFolder("schema.json", JSON.stringify(z.toJSONSchema(Weather)));
  report("@openai/codex", text, JSON.parse(ask("--output-schema", schema)));
} catch (error) {
  // Its own instructions are longer than the demo model's context.
  if (!ONLY_STRUCTURED || !/ran out of room in the model's context/.test(error.message)) throw error;
  report("@openai/codex", null, null, "its prompt is longer than the demo model's context");
} finally {
  rmSync(folder, { recursive: true, force: true });
}
