// Builds the page: web/src -> src/windfall/page/static. The result depends only on the sources and package-lock.json.
import * as esbuild from "esbuild";
import { readFileSync, writeFileSync } from "node:fs";

const out = new URL("../src/windfall/page/static/", import.meta.url).pathname;
await esbuild.build({
  entryPoints: ["src/main.ts"], bundle: true, minify: true, format: "iife", target: "es2022", charset: "ascii",
  legalComments: "none", outfile: `${out}page.js`,
});
const js = readFileSync(`${out}page.js`, "utf8");
if (js.includes("</script")) throw new Error("the script would end its own element");
const css = ["node_modules/uplot/dist/uPlot.min.css", "src/page.css"].map((path) => readFileSync(path, "utf8")).join("\n");
writeFileSync(`${out}page.css`, (await esbuild.transform(css, { loader: "css", minify: true })).code);
const version = JSON.parse(readFileSync("node_modules/uplot/package.json", "utf8")).version;
const license = readFileSync("node_modules/uplot/LICENSE", "utf8");
writeFileSync(`${out}LICENSES.txt`, `page.js and page.css contain uPlot ${version} (https://github.com/leeoniya/uPlot):\n\n${license}`);
