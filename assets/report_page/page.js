"use strict";
(() => {
  const root = document.documentElement, button = document.querySelector("button.theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  label();
  const short = (value) => {
    const size = Math.abs(value);
    for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= limit) return Number((value / limit).toPrecision(4)) + letter;
    return String(Number(value.toPrecision(4)));
  };
  const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: 3 });
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const element = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  for (const figure of document.querySelectorAll("figure.chart")) {
    const holder = figure.querySelector("script[type='application/json']");
    if (!holder) continue;
    const data = JSON.parse(holder.textContent), drawing = figure.querySelector("svg"), plot = figure.querySelector(".plot");
    const [left, right, top, bottom] = data.m;
    const px = (x) => left + (x - data.x[0]) / (data.x[1] - data.x[0]) * (data.w - left - right);
    const py = (y) => data.h - bottom - (y - data.y[0]) / (data.y[1] - data.y[0]) * (data.h - top - bottom);
    let layer = null, tip = null;
    const clear = () => { if (layer) { layer.remove(); tip.remove(); layer = tip = null; } };
    const show = (event) => {
      const box = drawing.getBoundingClientRect(), scale = data.w / box.width;
      const at = (event.clientX - box.left) * scale;
      const wanted = data.x[0] + (at - left) / (data.w - left - right) * (data.x[1] - data.x[0]);
      clear();
      layer = element("g", {});
      tip = document.createElement("div");
      tip.className = "tip";
      const lead = data.series.reduce((best, one) => one.x.length > best.x.length ? one : best);
      const x = lead.x[nearest(lead.x, wanted)];
      layer.append(element("line", { class: "cross", x1: px(x), x2: px(x), y1: top, y2: data.h - bottom }));
      const head = document.createElement("div");
      head.textContent = whole(x) + " " + data.xl;
      tip.append(head);
      for (const one of data.series) {
        const index = nearest(one.x, x);
        layer.append(element("circle", { class: "at c" + one.c % 8, cx: px(one.x[index]), cy: py(one.y[index]), r: 4 }));
        const row = document.createElement("div"), swatch = document.createElement("i");
        swatch.className = "c" + one.c % 8;
        const value = data.percent ? (100 * one.y[index]).toFixed(1) + "%" : short(one.y[index]);
        // A curve that was measured less often shows its nearest point, and where that lies.
        const elsewhere = one.x[index] === x ? "" : " (at " + whole(one.x[index]) + ")";
        row.append(swatch, (data.series.length > 1 ? one.l + ": " : "") + value + elsewhere);
        tip.append(row);
      }
      drawing.append(layer);
      plot.append(tip);
      const room = plot.clientWidth, where = px(x) / scale;
      tip.style.left = Math.max(0, where + 12 + tip.offsetWidth > room ? where - 12 - tip.offsetWidth : where + 12) + "px";
      tip.style.top = top / scale + "px";
    };
    drawing.addEventListener("pointermove", show);
    drawing.addEventListener("pointerleave", clear);
  }
})();
