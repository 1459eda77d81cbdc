// The value under the pointer, for every chart that carries its data.
const units = {
  number: v => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4)),
  percent: v => (100 * v).toFixed(1) + "%",
  seconds: v => +v.toPrecision(3) + " s",
  bytes: v => { let u = ["B", "kB", "MB", "GB", "TB"], i = 0; while (v >= 1000 && i < 4) { v /= 1000; i++; } return v.toFixed(i ? 1 : 0) + " " + u[i]; },
};
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart), [x0, x1, left, right] = chart.frame, card = svg.parentElement;
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
  rule.setAttribute("class", "pointer"); rule.setAttribute("y1", 12); rule.setAttribute("y2", 210); rule.style.display = "none";
  svg.append(rule);
  const tip = document.createElement("div"); tip.className = "tip"; tip.hidden = true; card.append(tip);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = x0 + ((event.clientX - box.left) * scale - left) / (right - left) * (x1 - x0);
    let at = null; const rows = [];
    for (const line of chart.lines) {
      let best = 0; line.x.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(line.x[best] - x)) best = i; });
      at = at ?? line.x[best];
      rows.push(`<div><i style="background:${line.color}"></i>${line.name} ${units[chart.kind](line.y[best])}</div>`);
    }
    const px = left + (at - x0) / (x1 - x0) * (right - left);
    rule.setAttribute("x1", px); rule.setAttribute("x2", px); rule.style.display = "";
    tip.innerHTML = `<div>at ${units.number(at)}</div>` + rows.join(""); tip.hidden = false;
    const room = card.getBoundingClientRect(), place = event.clientX - room.left;
    tip.style.left = (place > room.width / 2 ? place - tip.offsetWidth - 14 : place + 14) + "px";
    tip.style.top = (event.clientY - room.top - 10) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; rule.style.display = "none"; });
}
