// Draws each chart that is seen from the JSON beside it, in the page's colours: those of a closed part when it opens,
// and all again when the reader turns light or dark.
(() => {
  const charts = [...document.querySelectorAll("div.chart")].map((div) => {
    return { div, text: document.getElementById(div.dataset.figure).textContent };
  });
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const drawOne = ({ div, text: json }) => {
    const text = style("--text"), grid = style("--grid"), line = style("--line"), card = style("--card");
    const narrow = window.innerWidth < 720;
    // The darkest of the colours is hard to see on a dark page.
    const { data, layout } = JSON.parse(json.replaceAll("#0072b2", style("--ours-line")));
    const height = Number(div.dataset.height) + (narrow && data.length > 4 ? 80 : 0);
    const axis = (given) => ({ ...given, gridcolor: grid, linecolor: line, tickcolor: line, color: text });
    const dressed = {
      ...layout, height, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
      font: { color: text, size: narrow ? 11 : 12, family: "system-ui, DejaVu Sans, sans-serif" },
      hoverlabel: { bgcolor: card, bordercolor: line, font: { color: text } },
    };
    Plotly.react(div, data, dressed, { responsive: true, displayModeBar: false, scrollZoom: false });
  };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let round = 0;
  const draw = async () => {
    const mine = ++round;
    delete document.documentElement.dataset.drawn;
    for (const chart of charts) {
      // What lies in a closed part has no width yet: it is drawn when its part opens. (offsetParent doesn't tell.)
      if (chart.div.closest("details:not([open]), [hidden]") || chart.dark === dark.matches) continue;
      drawOne(chart);
      chart.dark = dark.matches;
      await new Promise((resume) => setTimeout(resume)); // the reader may scroll meanwhile
      if (mine !== round) return;
    }
    document.documentElement.dataset.drawn = String(charts.length);
  };
  draw();
  document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", draw));
  dark.addEventListener("change", draw);
  document.querySelectorAll("select.pick").forEach((pick) => pick.addEventListener("change", () => {
    const cards = pick.closest(".card").querySelectorAll(".picked");
    cards.forEach((card, at) => { card.hidden = at !== pick.selectedIndex; });
    draw();
  }));
  // A problem's line and, below it, all that is known of it.
  document.querySelectorAll("button[aria-expanded]").forEach((button) => button.addEventListener("click", () => {
    const below = button.closest("tr").nextElementSibling;
    below.hidden = !below.hidden;
    button.setAttribute("aria-expanded", String(!below.hidden));
  }));
})();
