// The page: asks the server each second how the cluster is, and draws it. Under /v1/cluster and /v1/cluster/live is all
// that it shows, for other programs too.

import { clock } from "./amounts.js";
import { drawCharts } from "./charts.js";
import { Chat } from "./chat.js";
import { find } from "./dom.js";
import { History } from "./history.js";
import { drawMachines } from "./machines.js";
import { runCharts, stepOf } from "./run_charts.js";
import { NoAnswer, Refusal, get, keepKey } from "./server.js";
import { servingCharts } from "./serving_charts.js";
import { drawCompletions, drawEvents, drawPredicted, drawPredictedStep, drawRun, drawSequences } from "./tables.js";

const SECONDS = 1;
const VIEWS = ["cluster", "chat"];

const chat = new Chat();
let history = null; // made when it is known whether this is a server or a training run
let timer = null;

async function look() {
  clearTimeout(timer);
  try {
    const status = await get("/v1/cluster");
    history ??= new History(status.training ? "/v1/training/live" : "/v1/cluster/live");
    if (!history.add(await get(history.path))) return look();
    find("key").hidden = true;
    if (!status.training) await chat.look();
    timer = setTimeout(look, 1000 * SECONDS);
    draw(status);
  } catch (error) {
    if (!(error instanceof Refusal || error instanceof NoAnswer)) throw error;
    failed(error);
  }
}

function draw(status) {
  const state = status.ready ? ["good", status.training ? "trains" : "ready"] : ["wait", status.doing || "not ready"];
  if (status.fault) state.splice(0, 2, "bad", "failed");
  showState(state[0], `${status.model ?? ""} ${state[1]}`.trim());
  document.title = `${status.model ?? "together-LLM"}: ${state[1]}`;
  notice("trouble", status.fault || status.trouble);
  notice("advice", status.advice);
  const losses = status.losses ? ` · ${status.losses} ${status.losses > 1 ? "nodes" : "node"} lost so far` : "";
  const whole = status.wanted && status.plan && status.wanted !== status.plan ? ` · the whole plan is ${status.wanted}` : "";
  find("plan").textContent = `plan ${status.plan || "none yet"}${whole} · epoch ${status.epoch ?? 1}${losses}`;
  find("tab-chat").hidden = Boolean(status.training);
  if (find("cluster").hidden) return;
  drawMachines(find("machines"), status, history);
  const isRead = matchMedia("(hover: hover)").matches && find("charts").matches(":hover");
  if (status.training) drawTraining(status, isRead);
  else drawServing(status, isRead);
  drawEvents(find("events"), history.events);
}

function drawServing(status, isRead) {
  const place = (sample) => clock(sample.time);
  const charts = servingCharts(history.samples, status.predicted);
  if (!isRead) drawCharts(find("charts"), charts, history, status.predicted, place);
  drawSequences(find("requests"), history.latest.sequences);
  drawPredicted(find("predicted"), status.predicted);
}

function drawTraining(status, isRead) {
  find("requests-title").textContent = "The run";
  if (!isRead) drawCharts(find("charts"), runCharts(history.samples), history, status.predicted, stepOf);
  drawRun(find("requests"), status.training, history.samples);
  drawCompletions(find("completions"), history.samples);
  drawPredictedStep(find("predicted"), status.predicted);
}

function failed(error) {
  if (error.status === 401) {
    const isFirst = find("key").hidden;
    find("key").hidden = false;
    find("key-fault").textContent = isFirst ? "" : error.message;
    showState("wait", "locked");
    find("key-field").focus();
    return;
  }
  timer = setTimeout(look, 1000 * SECONDS);
  showState("bad", "no answer");
  notice("trouble", error instanceof NoAnswer ? "The server does not answer. This page goes on asking." : error.message);
}

function showState(kind, words) {
  find("state").querySelector(".dot").className = `dot ${kind}`;
  const shown = find("state").querySelector(".words");
  if (shown.textContent !== words) shown.textContent = words;
}

function notice(id, words) {
  find(id).hidden = !words;
  if (find(id).textContent !== (words || "")) find(id).textContent = words || "";
}

function select(view) {
  for (const name of VIEWS) {
    const isSelected = name === view;
    find(name).hidden = !isSelected;
    find(`tab-${name}`).setAttribute("aria-selected", isSelected);
    find(`tab-${name}`).tabIndex = isSelected ? 0 : -1;
  }
  if (view === "chat") find("message").focus();
}

for (const name of VIEWS) {
  find(`tab-${name}`).addEventListener("click", () => {
    location.hash = name;
  });
  find(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = VIEWS[1 - VIEWS.indexOf(name)];
    location.hash = other;
    find(`tab-${other}`).focus();
  });
}
find("key").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(find("key-field").value);
  look();
});
const viewOfHash = () => select(location.hash === "#chat" && !find("tab-chat").hidden ? "chat" : "cluster");
window.addEventListener("hashchange", viewOfHash);
viewOfHash();
look();
