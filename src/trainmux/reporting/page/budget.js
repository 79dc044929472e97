// What the budget costs: step time against budget, with this plan marked.
class BudgetPanel extends Panel {
  constructor(canvas) {
    super(canvas, 240);
    this.points = data.budgetCurve.filter(([, time]) => time !== null);
    this.refused = data.budgetCurve.filter(([, time]) => time === null).map(([budget]) => budget);
    const budgets = [...data.budgetCurve.map(([budget]) => budget), data.budget];
    const times = [...this.points.map(([, time]) => time), data.step];
    const spread = (values) => Math.max(...values) - Math.min(...values) || Math.max(...values) * 0.1 || 1;
    this.least = { budget: Math.min(...budgets) - spread(budgets) * 0.04, time: Math.max(0, Math.min(...times) - spread(times) * 0.15) };
    this.most = { budget: Math.max(...budgets) + spread(budgets) * 0.04, time: Math.max(...times) + spread(times) * 0.2 };
    this.chosen = null;
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => this.choose(null));
    canvas.addEventListener("blur", () => this.choose(null));
    walkWithArrows(this, this.points.length, (at) => {
      const box = canvas.getBoundingClientRect();
      const [budget, time] = this.points[at];
      this.choose(at, box.left + this.bx(budget), box.top + this.by(time));
      announce(`budget ${formatBytes(budget)}: ${formatTime(time)} a step`);
    });
  }

  get bottom() {
    return this.height - 36;
  }

  bx(budget) {
    return margins.left + ((budget - this.least.budget) / (this.most.budget - this.least.budget)) * this.plotWidth;
  }

  by(time) {
    return this.bottom - ((time - this.least.time) / (this.most.time - this.least.time)) * (this.bottom - 12);
  }

  draw(pen) {
    this.drawAxes(pen);
    this.drawRefused(pen);
    pen.strokeStyle = colors.accent;
    pen.lineWidth = 2;
    pen.beginPath();
    for (const [budget, time] of this.points) pen.lineTo(this.bx(budget), this.by(time));
    pen.stroke();
    this.points.forEach(([budget, time], at) => {
      pen.fillStyle = at === this.chosen ? colors.ink : colors.accent;
      pen.beginPath();
      pen.arc(this.bx(budget), this.by(time), at === this.chosen ? 5.5 : 4, 0, 2 * Math.PI);
      pen.fill();
    });
    this.drawThisPlan(pen);
  }

  drawAxes(pen) {
    pen.lineWidth = 1;
    const rows = ticks(this.least.time, this.most.time, 1e6, 5);
    this.drawRows(pen, rows.values, (value) => this.by(value), (value) => `${grouped(value / 1e6, rows.places)} ms`);
    const unit = this.most.budget >= GIB ? GIB : MIB;
    const columns = ticks(this.least.budget, this.most.budget, unit, Math.max(2, this.plotWidth / 90));
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const value of columns.values) {
      const label = `${grouped(value / unit, columns.places)} ${unit === GIB ? "GiB" : "MiB"}`;
      pen.fillText(label, this.bx(value), this.bottom + 6);
    }
    pen.fillText("budget", margins.left + this.plotWidth / 2, this.bottom + 21);
  }

  drawRefused(pen) {
    if (!this.refused.length) return;
    const right = this.bx(Math.max(...this.refused));
    pen.globalAlpha = 0.35;
    pen.fillStyle = colors.stall;
    pen.fillRect(margins.left, 12, right - margins.left, this.bottom - 12);
    pen.globalAlpha = 1;
    this.label(pen, "nothing fits", margins.left + 6, this.bottom - 12, { color: colors.bad, weight: "" });
  }

  drawThisPlan(pen) {
    const x = this.bx(data.budget);
    const y = this.by(data.step);
    pen.strokeStyle = colors.bad;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(x, y, 8, 0, 2 * Math.PI);
    pen.stroke();
    const text = "this plan";
    const fits = x + 16 + pen.measureText(text).width < this.width - margins.right;
    const how = { color: colors.bad, align: fits ? "left" : "right", baseline: "bottom" };
    this.label(pen, text, fits ? x + 11 : x - 11, y - 6, how);
  }

  hover(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    let best = null;
    this.points.forEach(([budget], at) => {
      const distance = Math.abs(this.bx(budget) - x);
      if (distance < 40 && (best === null || distance < Math.abs(this.bx(this.points[best][0]) - x))) best = at;
    });
    this.choose(best, event.clientX, event.clientY);
  }

  choose(at, clientX, clientY) {
    this.chosen = at;
    if (at === null) hideTooltip();
    else {
      const [budget, time] = this.points[at];
      const fastest = Math.min(...this.points.map((point) => point[1]));
      const rows = [
        ["step", formatTime(time)],
        ["against the fastest", formatChange(time, fastest)],
        ["against this plan", formatChange(time, data.step)],
      ];
      showTooltip(tooltipRows(`budget ${formatBytes(budget)}`, rows), clientX, clientY);
    }
    drawSoon();
  }
}
