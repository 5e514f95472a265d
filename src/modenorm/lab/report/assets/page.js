"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f", "#a6761d", "#66a61e", "#e7298a", "#1f78b4"];
  const $ = (id) => document.getElementById(id);
  const colour = (place) => COLOURS[place % COLOURS.length];
  // Plotly reads some markup in text: names from files are shown as they are.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const percent = (value) => value.toFixed(1) + "\u00a0%";
  const known = (value) => value !== null && value !== undefined;
  const number = (value, digits = 2) => (known(value) ? value.toFixed(digits) : "–");
  const withError = (m) => (known(m) ? m.text : "–");
  const withoutError = (m) => (known(m) ? m.short : "–");

  function style(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function draw(id, traces, xTitle, yTitle, more = {}) {
    const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true };
    const layout = {
      font: { color: style("--ink"), family: "system-ui, sans-serif", size: 12 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 50, r: 12, t: 8, b: 44 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
      hoverlabel: { namelength: -1 },
      ...more,
      xaxis: { ...axis, title: { text: xTitle }, ...(more.xaxis || {}) },
      yaxis: { ...axis, title: { text: yTitle }, rangemode: "tozero", ...(more.yaxis || {}) },
    };
    Plotly.react(id, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }

  function describe(id, title, text) {
    $(id + "-chart").setAttribute("aria-label", title + ". " + text);
    $(id + "-name").textContent = title;
    $(id + "-text").textContent = text;
  }

  function table(id, head, rows) {
    const element = document.createElement("table");
    const line = (cells, tag, parent) => {
      const row = parent.insertRow();
      cells.forEach((cell, place) => {
        const box = document.createElement(place === 0 ? "th" : tag);
        if (tag === "th" || place === 0) box.scope = tag === "th" ? "col" : "row";
        if (place > 0) box.className = "n";
        box.textContent = cell;
        row.append(box);
      });
    };
    line(head, "th", element.createTHead());
    const body = element.createTBody();
    rows.forEach((cells) => line(cells, "td", body));
    $(id).replaceChildren(element);
  }

  function fill(select, entries) {
    select.replaceChildren(...entries.map(([value, text]) => new Option(text, value)));
  }

  function setRange(input, count) {
    input.max = Math.max(0, count - 1);
    input.value = Math.min(Number(input.value), count - 1);
    input.disabled = Number(input.max) === Number(input.min);
  }

  // Training curves and errors by domain

  function drawCurves() {
    const experiment = data.experiments[Number($("experiment").value)];
    const measure = $("measure").value, scale = $("scale").value;
    const what = measure === "test_error" ? "Test error" : "Training loss";
    const unit = measure === "test_error" ? "test error (%)" : "training loss (nats)";
    const traces = [], rows = [];
    experiment.variants.forEach((variant, place) => {
      variant.runs.map((run) => data.runs[run]).filter((run) => run.samples.length).forEach((run, n) => {
        const unfinished = run.state === "done" ? "" : " (" + run.state + ")";
        traces.push({
          x: run.samples, y: run[measure], name: plain(variant.label), legendgroup: String(place),
          showlegend: n === 0, mode: run.samples.length < 2 ? "markers" : "lines",
          line: { color: colour(place), width: 1.8, dash: unfinished ? "dot" : "solid" },
          marker: { color: colour(place) },
          hovertemplate: plain(`${variant.label}, seed ${run.seed}${unfinished}`) + ": %{y:.3f}<extra></extra>",
        });
        const last = run.samples.length - 1;
        rows.push([variant.label, String(run.seed) + unfinished, run.samples[last].toLocaleString("en"), number(run[measure][last], 3)]);
      });
    });
    const title = `${what}, ${experiment.title}`;
    draw("curves-chart", traces, "training images seen", unit,
      { yaxis: { type: scale, rangemode: scale === "log" ? "normal" : "tozero" } });
    const finals = experiment.variants.filter((v) => v.final).map((v) => `${v.label} ${withError(v.final)} %`);
    describe("curves", title, `${traces.length} training${traces.length === 1 ? "" : "s"}, over the number of training images seen.` +
      (finals.length ? ` Final test errors: ${finals.join("; ")}.` : ""));
    table("curves-table", ["Norm", "Seed", "Images seen", unit], rows);
    drawDomains(experiment);
  }

  function drawDomains(experiment) {
    $("domains").hidden = experiment.domains.length === 0;
    if (!experiment.domains.length) return;
    const traces = experiment.variants.filter((v) => v.domains.some(known)).map((variant, place) => ({
      type: "bar", name: plain(variant.label), x: experiment.domains.map(plain),
      y: variant.domains.map((m) => (m ? m.mean : null)), marker: { color: colour(experiment.variants.indexOf(variant)) },
      error_y: { type: "data", visible: variant.domains.some((m) => m && known(m.se)), array: variant.domains.map((m) => (m && m.se) || 0), color: style("--ink"), thickness: 1 },
      customdata: variant.domains.map(withoutError),
      hovertemplate: plain(variant.label) + ", %{x}: %{customdata} %<extra></extra>",
    }));
    const title = "Test error by domain, " + experiment.title;
    draw("domains-chart", traces, "domain", "test error (%)", { barmode: "group" });
    const best = experiment.domains.map((name, d) => {
      const rows = experiment.variants.filter((v) => v.domains[d]);
      rows.sort((a, b) => a.domains[d].mean - b.domains[d].mean);
      return rows.length ? `${name}: ${rows[0].label} (${withoutError(rows[0].domains[d])} %)` : "";
    });
    describe("domains", title, "Lowest mean error in each domain. " + best.filter(Boolean).join("; ") + ".");
    table("domains-table", ["Norm", ...experiment.domains],
      experiment.variants.map((v) => [v.label, ...v.domains.map(withError)]));
  }

  // Modes

  function modeTraces(rows, x, kind, turned = false) {
    const count = rows.length ? rows[0].length : 0;
    return Array.from({ length: count }, (_, k) => {
      const y = rows.map((shares) => shares[k]);
      const shared = { name: "mode " + k, hovertemplate: `mode ${k}: %{${turned ? "x" : "y"}:.1f} %<extra></extra>` };
      if (kind === "area") {
        return { ...shared, x, y, stackgroup: "all", line: { width: 0.5, color: colour(k) }, fillcolor: colour(k) + "cc" };
      }
      const places = turned ? { x: y, y: x, orientation: "h" } : { x, y };
      return { ...shared, ...places, type: "bar", marker: { color: colour(k) } };
    });
  }

  const full = { range: [0, 100], fixedrange: true };

  function drawModes() {
    const run = data.runs[Number($("modes-run").value)], modes = run.modes;
    setRange($("modes-layer"), modes.layers.length);
    const layer = modes.layers[Number($("modes-layer").value)], name = layer.name || "model";
    $("modes-layer-name").textContent = name;
    $("modes-layer").setAttribute("aria-valuetext", name);
    setDomains(Object.keys(layer.by_domain));
    drawShares(layer, name, modes.samples);
    drawUsers(layer, name);
    const names = modes.layers.map((l) => l.name || "model"), ends = modes.layers.map((l) => l.shares[l.shares.length - 1]);
    const title = "Share of the modes in every layer at the end";
    draw("layers-chart", modeTraces(ends, names.map(plain), "bar"), "layer", "share of test images (%)",
      { yaxis: full, barmode: "stack", xaxis: { type: "category" } });
    describe("layers", title, `${names.length} layer${names.length === 1 ? "" : "s"} of ${run.title}.`);
    const width = Math.max(...ends.map((e) => e.length));
    table("modes-table", ["Layer", ...Array.from({ length: width }, (_, k) => "mode " + k + " %"), "entropy (bits)", "distinct modes", "after pruning"],
      modes.layers.map((l, i) => [names[i], ...Array.from({ length: width }, (_, k) => (known(ends[i][k]) ? number(ends[i][k], 1) : "")),
        number(l.entropy, 3), known(l.distinct) ? l.distinct : "", known(l.needed) ? l.needed : ""]));
  }

  function setDomains(names) {
    const select = $("modes-domain"), chosen = select.value, options = [...select.options].slice(1);
    select.parentElement.hidden = names.length === 0;
    if (JSON.stringify(names) === JSON.stringify(options.map((option) => option.value))) return;
    fill(select, [["", "all test images"], ...names.map((name) => [name, name])]);
    select.value = names.includes(chosen) ? chosen : "";
  }

  function drawShares(layer, name, samples) {
    const domain = $("modes-domain").value, shares = domain ? layer.by_domain[domain] : layer.shares;
    const last = shares[shares.length - 1], single = shares.length === 1;
    draw("shares-chart", modeTraces(shares, single ? ["end"] : samples, single ? "bar" : "area"), "training images seen",
      `share of ${domain ? "the domain's " : ""}test images (%)`, { yaxis: full, barmode: "stack" });
    describe("shares", `Share of the modes over training, ${name}` + (domain ? `, ${domain} alone` : ""),
      "At the end: " + last.map((s, k) => `mode ${k} ${percent(s)}`).join(", ") + "." + (domain ? "" : aboutGates(layer, last.length)));
    table("shares-table", ["Images seen", ...last.map((_, k) => `mode ${k} %`)],
      shares.map((row, i) => [samples[i].toLocaleString("en"), ...row.map((s) => number(s, 1))]));
  }

  function aboutGates(layer, count) {
    return (known(layer.entropy) ? ` Mean entropy of the gates ${number(layer.entropy)} bits of at most ${number(Math.log2(count))}: ` +
      "0 assigns every image to one mode, the most shares it out evenly." : "") +
      (known(layer.distinct) ? ` Alive and distinct: ${layer.distinct} of ${count} modes.` : "") +
      (known(layer.needed) ? ` Pruning left ${layer.needed}.` : "");
  }

  function drawUsers(layer, name) {
    const domains = Object.keys(layer.by_domain), ends = {};
    domains.forEach((d) => { ends[d] = layer.by_domain[d][layer.by_domain[d].length - 1]; });
    $("users-chart").parentElement.hidden = domains.length === 0;
    if (!domains.length) return;
    const title = `Who uses which mode at the end, ${name}`;
    draw("users-chart", modeTraces(domains.map((d) => ends[d]), domains.map(plain), "bar", true),
      "share of the domain's test images (%)", "", { xaxis: full, barmode: "stack", yaxis: { autorange: "reversed", type: "category" } });
    describe("users", title, separation(ends) + " " + domains.map((d) => `${d}: ` + ends[d].map((s, k) => `mode ${k} ${percent(s)}`).join(", ")).join("; ") + ".");
  }

  function separation(byDomain) {
    const names = Object.keys(byDomain);
    let best = { gap: 0 };
    byDomain[names[0]].forEach((_, k) => {
      const sorted = [...names].sort((a, b) => byDomain[b][k] - byDomain[a][k]);
      const high = sorted[0], low = sorted[sorted.length - 1], gap = byDomain[high][k] - byDomain[low][k];
      if (gap > best.gap) best = { gap, k, high, low };
    });
    if (best.gap < 5) return "All domains use the modes alike: this layer does not tell them apart.";
    return `Mode ${best.k} tells most apart: it takes ${percent(byDomain[best.high][best.k])} of ${best.high} ` +
      `and ${percent(byDomain[best.low][best.k])} of ${best.low}.`;
  }

  // Gallery

  function drawGallery() {
    const gallery = data.galleries[Number($("gallery-run").value)];
    setRange($("gallery-layer"), gallery.layers.length);
    const layer = gallery.layers[Number($("gallery-layer").value)];
    setRange($("gallery-mode"), layer.modes.length);
    const chosen = Number($("gallery-mode").value), all = chosen < 0;
    const name = all ? `all ${layer.modes.length}` : `mode ${chosen}`;
    $("gallery-layer-name").textContent = layer.name;
    $("gallery-layer").setAttribute("aria-valuetext", layer.name);
    $("gallery-mode-name").textContent = name;
    $("gallery-mode").setAttribute("aria-valuetext", name);
    $("gallery-text").textContent = `${gallery.numImages.toLocaleString("en")} test images of ${gallery.dataset} were looked at.` +
      (layer.findings.length ? " Note: " + layer.findings.join("; ") + "." : "");
    const shown = layer.modes.map((mode, k) => [mode, k]).filter(([, k]) => all || k === chosen);
    $("tiles").replaceChildren(...shown.flatMap(([mode, k]) => claimed(mode, k, gallery, all ? 12 : mode.claims.length)));
  }

  function claimed(mode, k, gallery, count) {
    const claims = mode.claims.slice(0, count), several = new Set(claims.map((claim) => claim[3])).size > 1, kinds = {};
    claims.map((claim) => (several ? claim[3] : short(claim[2], claim[3]))).forEach((kind) => { kinds[kind] = (kinds[kind] || 0) + 1; });
    const counted = Object.entries(kinds).sort((a, b) => b[1] - a[1]).slice(0, 4).map(([name, n]) => `${n} ${name}`);
    const heading = document.createElement("h4"), list = document.createElement("div");
    heading.textContent = `Mode ${k}: share ${percent(100 * mode.share)}; among the strongest ${claims.length}: ${counted.join(", ")}`;
    list.className = "tiles";
    list.setAttribute("role", "list");
    list.append(...claims.map((claim) => tile(claim, gallery)));
    return [heading, list];
  }

  // Classes of mixed data are named domain/class.
  const short = (label, domain) => (label.startsWith(domain + "/") ? label.slice(domain.length + 1) : label);

  function tile([place, gate, label, domain], gallery) {
    const box = document.createElement("div"), image = document.createElement("i"), text = document.createElement("span");
    box.className = "tile";
    box.setAttribute("role", "listitem");
    const side = window.matchMedia("(max-width: 34rem)").matches ? 64 : 72, columns = data.galleryColumns;
    image.setAttribute("role", "img");
    image.setAttribute("aria-label", `${label}${domain === label ? "" : " of " + domain}, gate ${gate.toFixed(3)}`);
    image.style.backgroundImage = `url("${gallery.picture}")`;
    image.style.backgroundSize = `${columns * side}px auto`;
    image.style.backgroundPosition = `-${(place % columns) * side}px -${Math.floor(place / columns) * side}px`;
    text.append(short(label, domain), document.createElement("br"), gate.toFixed(3));
    box.append(image, text);
    return box;
  }

  // Controls

  const redraw = [];
  function connect(draws, ids) {
    ids.forEach((id) => $(id).addEventListener("input", draws));
    redraw.push(draws);
    draws();
  }

  if (data.experiments.length) {
    fill($("experiment"), data.experiments.map((e, i) => [i, e.title]));
    const evaluated = (e) => e.variants.some((v) => v.runs.some((run) => data.runs[run].samples.length));
    $("experiment").value = Math.max(0, data.experiments.findIndex(evaluated));
    connect(drawCurves, ["experiment", "measure", "scale"]);
  }
  const withModes = data.runs.map((run, i) => [i, run.title]).filter(([i]) => data.runs[i].modes);
  if (withModes.length) {
    fill($("modes-run"), withModes);
    $("modes-layer").value = 0;
    connect(drawModes, ["modes-run", "modes-layer", "modes-domain"]);
  }
  if (data.galleries.length) {
    fill($("gallery-run"), data.galleries.map((g, i) => [i, g.run === null ? g.dataset : data.runs[g.run].title]));
    $("gallery-layer").value = 0;
    $("gallery-mode").value = -1;
    connect(drawGallery, ["gallery-run", "gallery-layer", "gallery-mode"]);
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw.forEach((f) => f()));
  window.matchMedia("(max-width: 34rem)").addEventListener("change", () => redraw.forEach((f) => f()));
  document.documentElement.dataset.ready = "yes";
})();
