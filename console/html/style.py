"""A page's style sheet; dark if the reader's system is."""

COLOURS = """
:root { --paper:#faf9f6; --card:#ffffff; --ink:#1e272e; --soft:#6c7780; --line:#e4e2db;
  --band0:#f3f6f7; --band1:#e6eff2; --water:#1f6f8b; --fill:#1f6f8b1c; --mark:#b4534f;
  --past:#7a8791; --shade:#0003; }
@media (prefers-color-scheme: dark) { :root { --paper:#12181c; --card:#1a2227; --ink:#e6ebee;
  --soft:#93a0a8; --line:#2c363c; --band0:#1e272c; --band1:#243037; --water:#63b3cf;
  --fill:#63b3cf22; --mark:#e08a84; --past:#8797a1; --shade:#fff4; } }
"""

SCROLL = """
.scroll { overflow-x:auto; background:
  linear-gradient(90deg,var(--card) 50%,transparent) 0 0/36px 100% no-repeat local,
  linear-gradient(270deg,var(--card) 50%,transparent) 100% 0/36px 100% no-repeat local,
  linear-gradient(90deg,var(--shade),transparent) 0 1px/12px calc(100% - 2px) no-repeat scroll,
  linear-gradient(270deg,var(--shade),transparent) 100% 1px/12px calc(100% - 2px) no-repeat
    scroll; }
.scroll.cut::after { content:"scroll sideways for the rest →"; position:sticky; left:0;
  display:block; width:max-content; padding:2px 0 6px; font-size:12px; color:var(--soft); }
@media (pointer:coarse) { .scroll.cut::after { content:"swipe sideways for the rest →"; } }
"""
"""Parts that are wider than the screen."""

CHARTS = """
svg text { font:11.5px ui-sans-serif,system-ui,sans-serif; fill:var(--soft); }
.tick.y,.tick.end { text-anchor:end; } .tick.x { text-anchor:middle; }
svg .phase { text-anchor:middle; font-weight:600; }
.band.b0 { fill:var(--band0); } .band.b1 { fill:var(--band1); }
.grid { stroke:var(--line); stroke-width:1; }
polyline { fill:none; stroke:var(--ink); stroke-linejoin:round; stroke-linecap:round; }
rect.pass.forward { fill:#1f6f8b; } rect.pass.backward { fill:#c07f2c; }
svg text.pass { fill:#fff; text-anchor:middle; pointer-events:none; }
rect.pass.update { fill:var(--past); } .key i.update { background:var(--past); }
.limit { stroke-width:1.4; stroke:var(--mark); stroke-dasharray:5 4; }
.key i.forward { background:#1f6f8b; } .key i.backward { background:#c07f2c; }
.strong { stroke-width:2.4; } .medium { stroke-width:1.6; stroke:var(--water); }
.thin { stroke-width:1.5; opacity:.9; }
.fill { fill:var(--fill); } .dot { fill:var(--ink); }
.mark line { stroke-width:1.2; stroke-dasharray:3 3; }
.mark.restart line { stroke:var(--past); } .mark.restart circle { fill:var(--past); }
.mark.skipped line { stroke:var(--mark); } .mark.skipped circle { fill:var(--mark); }
.share { shape-rendering:crispEdges; }
.probe { fill:transparent; } .probe:hover { fill:var(--fill); }
"""
"""Charts and timelines, of pages and of pictures."""

SIDES = """
@media (max-width:600px) {
  table.sides { min-width:calc(var(--columns)*94px); }
  table.sides,table.sides thead,table.sides tbody { display:block; }
  table.sides tr { display:grid; grid-template-columns:repeat(var(--columns),minmax(84px,1fr));
    gap:1px 10px; padding:7px 0; border-top:1px solid var(--line); }
  table.sides thead tr { border-top:0; }
  table.sides tr > * { min-width:0; padding:0; border:0; white-space:normal;
    overflow-wrap:anywhere; }
  table.sides tr > :first-child { grid-column:1/-1; font-weight:400; color:var(--soft); }
  table.sides thead th:first-child:empty { display:none; } }
"""
"""A table with a column for each run. On a phone, the name of a row stands above its values."""

CSS = f"""{COLOURS}{SCROLL}{SIDES}{CHARTS}"""
CSS += """
* { box-sizing:border-box; margin:0; }
body { background:var(--paper); color:var(--ink); font:15px/1.5 ui-sans-serif,system-ui,
  "Segoe UI","Helvetica Neue",Arial,sans-serif; font-variant-numeric:tabular-nums; }
main { max-width:1160px; margin:0 auto; padding:44px 28px 60px; }
header { display:flex; justify-content:space-between; align-items:flex-end; gap:20px; }
.over { color:var(--water); font-size:13px; letter-spacing:.06em; }
h1 { font-size:34px; font-weight:650; letter-spacing:-.02em; line-height:1.15;
  overflow-wrap:anywhere; }
h2 { font-size:15px; font-weight:650; white-space:nowrap; }
h2 small { font-size:12.5px; font-weight:400; color:var(--soft); margin-left:6px; }
.status { padding:5px 14px; border-radius:99px; font-size:13px; font-weight:600; color:#fff;
  background:var(--soft); white-space:nowrap; }
.status.finished { background:#4b8f62; } .status.interrupted,.status.unscored {
  background:#c07f2c; }
.status.failed,.status.killed { background:#b4534f; } .status.running { background:var(--water); }
.model { display:flex; align-items:center; flex-wrap:wrap; gap:8px 18px; margin:18px 0 22px; }
.stripe { display:flex; gap:2px; flex:0 1 auto; max-width:100%; overflow:hidden; }
.stripe i { width:26px; min-width:3px; flex:0 1 26px; height:18px; border-radius:3px; }
.count { color:var(--soft); font-size:13px; }
.tiles { display:flex; flex-wrap:wrap; gap:1px; background:var(--line);
  border:1px solid var(--line); border-radius:12px; overflow:hidden; }
.tiles div { flex:1 0 16%; background:var(--card); padding:14px 16px 12px; }
.tiles p,.tiles small { color:var(--soft); font-size:12.5px; display:block; }
.tiles strong { font-size:23px; font-weight:640; letter-spacing:-.01em; display:block; }
section { background:var(--card); border:1px solid var(--line); border-radius:12px;
  padding:16px 20px 14px; margin-top:18px; }
.head { display:flex; justify-content:space-between; align-items:baseline; flex-wrap:wrap;
  gap:4px 20px; margin-bottom:8px; }
.pair { display:grid; grid-template-columns:1fr 1fr; gap:0 18px; } .pair > * { min-width:0; }
.keys,.legend { display:flex; flex-wrap:wrap; gap:4px 16px; align-items:center; }
.key { font-size:13px; color:var(--soft); white-space:nowrap; }
.key i { display:inline-block; width:10px; height:10px; border-radius:3px; margin-right:6px; }
em { font-style:normal; color:var(--soft); }
.note { color:var(--soft); font-size:12.5px; margin-top:12px; } .note + .tiles { margin-top:18px; }
code,pre { font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
  color:var(--ink); overflow-wrap:anywhere; white-space:pre-wrap; }
.failure { border-left:4px solid var(--mark); margin:0 0 18px; }
svg.wide,svg.half { display:block; width:100%; height:auto; overflow:visible; }
table { border-collapse:collapse; width:100%; margin-top:12px; font-size:13px; }
th,td { padding:6px 10px; text-align:right; border-top:1px solid var(--line); font-weight:400; }
thead th { color:var(--soft); border-top:0; } thead th[colspan] { text-align:center; }
.sub th:first-child { text-align:right; padding-left:10px; } tbody th { font-weight:600; }
th:first-child,td:first-child { text-align:left; padding-left:0; }
.losses .sub th { text-align:right; }
.losses .sub th:first-child { text-align:left; padding-left:0; }
.history td,.history th,.sides td,.sides th,.proofs td,.proofs th { text-align:left; }
td,th { white-space:nowrap; } .history td,.history th { vertical-align:top; }
.history td:nth-child(n+3),.sides td { white-space:normal; }
.history thead th { font-weight:400; }
.sides tr.differs td { font-weight:600; } .sides td { word-break:break-word; }
.meanings td:last-child,.meanings th:last-child { text-align:left; }
.meanings td:last-child { white-space:normal; color:var(--soft); }
.meanings .key i { margin-right:8px; } h1.plan { font-size:22px; margin-top:40px; }
dl { display:grid; grid-template-columns:max-content 1fr; gap:5px 22px; margin-top:10px;
  font-size:13.5px; } dt { color:var(--soft); } dd { margin:0; overflow-wrap:anywhere; }
footer { margin-top:26px; color:var(--soft); font-size:12.5px; text-align:center; }
@media (max-width:860px) { .tiles div { flex-basis:30%; }
  .pair { grid-template-columns:1fr; } main { padding:28px 14px; } }
@media (max-width:600px) { .tiles div { flex-basis:40%; } section { padding:14px; }
  thead th[colspan] { text-align:left; } /* the middle of its columns may be off the screen */
  svg.wide { min-width:680px; } svg.half { min-width:420px; } svg.wide text { font-size:14px; }
  .history { min-width:680px; } h1 { font-size:27px; } h2 { white-space:normal; }
  .meanings td:last-child:nth-child(n+4) { min-width:480px; } }
@media print { body { background:#fff; } section,.tiles { break-inside:avoid; } }
"""
