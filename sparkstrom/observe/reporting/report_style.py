"""Report style: colours and sizes of a report's page, for light and dark, wide and narrow.

Curves have colours that people who see fewer of them tell apart (after Okabe and Ito), darkened
for light pages and lightened for dark ones until they stand out by 3:1, and dashes beside that.
"""

STYLE = """
:root{color-scheme:light dark;--page:#ffffff;--ink:#17212b;--muted:#56626e;--line:#d9dfe5;
--card:#f5f7f9;--good:#00694e;--bad:#b83a00;--c0:#0072b2;--c1:#c44e00;--c2:#007a5c;--c3:#a3427c;
--c4:#8a6100;--c5:#5b6470}
@media (prefers-color-scheme:dark){:root{--page:#12171d;--ink:#e4e9ee;--muted:#a1adb9;
--line:#35404b;--card:#1a2129;--good:#3fcf9f;--bad:#ff8f57;--c0:#56b4e9;--c1:#ff8f57;--c2:#2bc79a;
--c3:#e79ac4;--c4:#f0c24b;--c5:#a9b2bd}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1280px;padding:20px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:0 0 4px}h2{font-size:1.25rem;margin:32px 0 4px}
h3{font-size:1.05rem;margin:24px 0 8px}h4{font-size:.95rem;margin:0}
p{margin:4px 0}a{color:var(--c0)}.muted{color:var(--muted)}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(145px,1fr));gap:10px;
margin:16px 0;padding:0;list-style:none}
.tiles li{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 10px}
.tiles span{display:block;color:var(--muted);font-size:.8rem}
.tiles strong{font-size:1rem;font-weight:600}
.warns{border-left:3px solid var(--bad);margin:12px 0;padding:2px 0 2px 28px}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:16px}
figure{margin:0;padding:12px;background:var(--card);border:1px solid var(--line);border-radius:8px;
min-width:0}
figcaption{min-height:3.2em}
.legend{display:flex;flex-wrap:wrap;gap:0 14px;margin:0;padding:0;list-style:none;
font-size:.8rem;color:var(--muted)}
.key{width:26px;height:12px;margin-right:5px;vertical-align:-1px}.box{width:14px}
.plot{display:block;width:100%;height:auto;font-size:12px}
.plot text{fill:var(--muted)}
.grid{stroke:var(--line)}.axis{stroke:var(--muted)}
.curve{fill:none;stroke-width:2;stroke-linejoin:round}
.c0{stroke:var(--c0);--own:var(--c0)}.c1{stroke:var(--c1);--own:var(--c1);stroke-dasharray:7 3}
.c2{stroke:var(--c2);--own:var(--c2);stroke-dasharray:2 3}
.c3{stroke:var(--c3);--own:var(--c3);stroke-dasharray:8 3 2 3}
.c4{stroke:var(--c4);--own:var(--c4);stroke-dasharray:4 4}
.c5{stroke:var(--c5);--own:var(--c5);stroke-dasharray:1 4}
.dot,.bar{fill:var(--own);stroke:none}
.bar:hover{opacity:.75}
.mark line{stroke:var(--bad);stroke-dasharray:3 3}.mark polygon{fill:var(--bad)}
.mark.back line{stroke:var(--good)}.mark.back polygon{fill:var(--good)}
.mark.saved line{stroke:var(--muted);stroke-dasharray:1 5}.mark.saved polygon{fill:var(--muted)}
.look rect,.hit{fill:transparent}.look line{stroke:none}.look:hover line{stroke:var(--muted)}
section>section{break-inside:avoid}
.groups{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(380px,100%),1fr));
gap:0 32px}
.groups section:has(.scrolls){grid-column:1/-1}
.groups section{min-width:0;margin-bottom:18px}
table{border-collapse:collapse;font-size:.88rem}
th,td{text-align:left;padding:2px 18px 2px 0;vertical-align:top;font-weight:normal}
th{color:var(--muted)}
.pairs th{white-space:nowrap}
.wide th,.wide td{border-bottom:1px solid var(--line);white-space:nowrap;overflow-wrap:normal}
.scrolls{overflow-x:auto}
details{margin-top:8px}
summary{cursor:pointer;color:var(--muted);font-size:.88rem}
h3+details>summary{font-size:1rem}
code{font-size:.9em}
@media (max-width:500px){body{padding:12px}.plots{gap:12px}figure{padding:8px}
figcaption{min-height:0}}
"""
