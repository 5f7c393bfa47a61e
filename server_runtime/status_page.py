"""The live status page: one file of HTML that asks /status every two seconds and puts texts, never markup, into tables.

What it shows is `status`'s document.
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Cutlayer: run</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; width: 100%; margin: .5em 0 1.5em }
th, td { text-align: left; padding: .3em .8em .3em 0; border-bottom: 1px solid #ddd; vertical-align: top }
.lost { color: #a00 } .quiet { color: #777 }
</style></head><body>
<h1 id="run">Cutlayer</h1><p id="facts" class="quiet">asking the server</p>
<h2>Sites</h2><table><thead><tr><th>site<th>state<th>waits for<th>since<th>accuracy<th>loss<th>epoch<th>bytes up, down
<th>left out</tr></thead><tbody id="sites"></tbody></table>
<h2>Devices</h2><table><thead><tr><th>device<th>site<th>state<th>since<th>does<th>heard<th>in<th>out
<th>package<th>update</tr></thead>
<tbody id="devices"></tbody></table>
<p class="quiet">Energy stays on the devices (edge-run status). What an attacker reads of features is in the
package's leakage table (leakage-profile). Figures also at
 <a href="/metrics">/metrics</a> and <a href="/status">/status</a>.</p>
<script>
const known = (value, text) => value === null || value === undefined ? "unknown" : text(value);
const age = s => s < 120 ? s.toFixed(0) + " s" : (s / 60).toFixed(0) + " min";
const size = b => b < 1e3 ? b + " B" : b < 1e6 ? (b / 1e3).toFixed(1) + " kB" : (b / 1e6).toFixed(1) + " MB";
const figure = x => typeof x === "number" ? Number(x.toPrecision(4)).toString() : String(x);
function rows(id, lines) {
  const body = document.getElementById(id);
  body.replaceChildren(...lines.map(line => {
    const row = document.createElement("tr");
    for (const text of line) row.insertCell().textContent = text;
    return row;
  }));
}
async function look() {
  const facts = document.getElementById("facts");
  try {
    const s = await (await fetch("/status")).json();
    document.getElementById("run").textContent = "Run " + s.run;
    facts.className = "quiet";
    facts.textContent = `${s.strategy}, ${s.label_mode}, kappa ${s.kappa}; up for ${age(s.up_s)}; ${s.connections} ` +
      `connections, ${s.predictions_waiting} batches wait for scores; ${size(s.rss_bytes)} of memory`;
    rows("sites", s.sites.map(x => [x.site, x.state, x.cause || x.waiting_for || "nothing yet", known(x.since_s, age),
      known(x.metrics.accuracy, figure), known(x.metrics.loss, figure), known(x.metrics.epoch, figure),
      known(x.metrics.bytes_up, size) + ", " + known(x.metrics.bytes_down, size), x.metrics.quarantined || ""]));
    rows("devices", s.devices.map(x => [x.device, x.site, x.state, known(x.since_s, age),
      x.busy === null ? "" : x.busy ? "works" : "waits for " + (x.waiting_for || "nothing"), known(x.heard_s, age),
      size(x.received_bytes), size(x.sent_bytes), (x.package || "").slice(0, 12), x.update || ""]));
  } catch (error) {
    facts.className = "lost";
    facts.textContent = "the server does not answer: what is below is old";
  }
}
look();
setInterval(look, 2000);
</script></body></html>
"""
