// The cluster as a picture: a card for each machine, by pipeline stage, with arrows for what goes on to the next stage.

import { bytes, counted, percent, seconds } from "./amounts.js";
import { element, replace, svg } from "./dom.js";

/** Draw the nodes of a report (`/v1/cluster`) with what they did lately. */
export function drawMachines(parent, status, history) {
  const placed = status.nodes.filter((node) => node.rank !== null && node.rank !== undefined);
  const stages = [...Map.groupBy(placed, (node) => node.stage).entries()].sort(([one], [other]) => one - other);
  const slowest = slowestStage(stages, history);
  const drawn = stages.map(([number, nodes], place) => {
    const next = stages[(place + 1) % stages.length][1];
    const cards = nodes.map((node) => card(node, status, history, stages.length > 1 && slowest === number));
    const hop = stages.length > 1 ? arrow(nodes, next, status, history, place === stages.length - 1) : null;
    return element("li", { class: "stage" }, element("div", { class: "cards" }, ...cards), hop);
  });
  const others = status.nodes.filter((node) => node.rank === null || node.rank === undefined);
  const spare = others.map((node) =>
    element("li", { class: "stage" }, element("div", { class: "cards" }, card(node, status, history, false))),
  );
  const alone = element("li", { class: "stage" }, element("div", { class: "card" }, "All layers are in this process."));
  replace(parent, drawn, spare, status.nodes.length ? null : alone);
}

function card(node, status, history, isSlowest) {
  const { busy, step } = history.node(node.node);
  const isWaited = history.latest?.waits_for === node.node && history.latest.seconds_since_step > 1;
  const isLost = Boolean(node.reason);
  const place = node.rank === null || node.rank === undefined ? node.role || "no rank" : `rank ${node.rank}`;
  const lines = [
    node.layers ? `layers ${node.layers[0]} to ${node.layers[1] - 1}${share(node)}` : "holds no layers",
    `${node.host_name} · ${node.address} · ${counted(node.cores, "core")}`,
  ];
  const expected = status.predicted?.stages?.[node.stage];
  return element(
    "div",
    { class: `card${isLost ? " lost" : isWaited || isSlowest ? " late" : ""}` },
    element("h3", {}, node.node, element("span", {}, `${place} · ${phase(node)}`)),
    ...lines.map((line) => element("p", { class: "quiet" }, line)),
    memoryBar(node),
    busy === null ? null : bar([["busy", busy]], `computing ${percent(busy)} of the time`),
    busy === null
      ? null
      : element(
          "p",
          {},
          `computing ${percent(busy)} of the time`,
          step === null ? "" : ` · ${seconds(step)} a step${expected ? ` (${seconds(expected)} predicted)` : ""}`,
        ),
    isSlowest ? element("p", {}, "the slowest stage: the others wait for it") : null,
    isWaited ? element("p", {}, `waited for since ${seconds(history.latest.seconds_since_step)}`) : null,
    isLost ? element("p", { class: "fault" }, `${node.phase}: ${node.reason}`) : null,
  );
}

function share(node) {
  return node.share !== null && node.share < 1 ? `, ${percent(node.share)} of each` : "";
}

function phase(node) {
  const { done, total } = node.loading;
  return node.phase === "loading" && total ? `loading ${percent(done / total)}` : node.phase;
}

function memoryBar(node) {
  const room = Math.max(node.memory_bytes, node.rss_bytes, 1);
  const rest = Math.max(0, node.rss_bytes - node.parameter_bytes - node.cache_bytes);
  const words = `${bytes(node.rss_bytes)} of ${bytes(node.memory_bytes)}: weights ${bytes(node.parameter_bytes)}`
    + (node.cache_bytes ? `, cache ${bytes(node.cache_bytes)}` : "");
  const parts = [["weights", node.parameter_bytes / room], ["cache", node.cache_bytes / room], ["rest", rest / room]];
  return element("div", {}, bar(parts, words), element("p", {}, words));
}

// Widths are attributes of SVG: the page's policy allows no inline styles.
function bar(parts, words) {
  let at = 0;
  const rectangles = parts.map(([kind, part]) => {
    const made = svg("rect", { class: kind, x: `${100 * at}%`, width: `${100 * Math.min(part, 1 - at)}%`, height: "100%" });
    at = Math.min(1, at + part);
    return made;
  });
  return element("div", { class: "bar", role: "img", "aria-label": words }, svg("svg", {}, ...rectangles));
}

function arrow(nodes, next, status, history, isReturn) {
  const rate = history.rate(nodes.map((node) => node.rank), next.map((node) => node.rank));
  const measured = measuredPath(nodes[0].node, next[0].node, status.survey);
  return element(
    "div",
    { class: "hop" },
    element("span", { class: "arrow", "aria-hidden": "true" }, isReturn ? "↺" : "→"),
    rate === null ? null : element("span", {}, `${isReturn ? "back to the first: " : ""}${bytes(rate)}/s`),
    measured ? element("span", {}, `${seconds(measured.latency)}, ${megabits(measured.bandwidth)}`) : null,
  );
}

const megabits = (bandwidth) => `${Math.round((8 * bandwidth) / 1e6).toLocaleString("en")} Mbit/s`;

function measuredPath(source, target, survey) {
  if (!survey) return null;
  const index = (name) => survey.nodes.findIndex((node) => node.node === name);
  return survey.ways.find((path) => path.source === index(source) && path.target === index(target)) ?? null;
}

/** The stage that takes longest for a batch, where it takes a fifth longer than the others do on an average. */
function slowestStage(stages, history) {
  const steps = stages
    .map(([number, nodes]) => [number, Math.max(...nodes.map((node) => history.node(node.node).step ?? 0))])
    .filter(([, step]) => step > 0)
    .sort(([, one], [, other]) => other - one);
  if (steps.length < 2) return null;
  const others = steps.slice(1).reduce((total, [, step]) => total + step, 0) / (steps.length - 1);
  return steps[0][1] > 1.2 * others ? steps[0][0] : null;
}
