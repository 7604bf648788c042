/* SPDX-License-Identifier: Apache-2.0
 *
 * How the page looks, and its script. Colours are those of Okabe and Ito, which people with any common colour blindness
 * tell apart; none is alone in saying something: lines differ in dashes and marks, areas in hatching, lanes and columns
 * in their place. The script shows at the pointer what the tables say; without it the page has all numbers. */
#include "tools/vckpt/report/report.h"

const char report_style[] =
	":root{color-scheme:light dark;--ink:#1b1b1b;--soft:#595959;--line:#d4d4d4;--ground:#fff;--card:#f6f6f4;"
	"--a:#0072b2;--b:#d55e00;--c:#009e73;--d:#cc79a7;--e:#e69f00;--f:#56b4e9;--g:#7a7a7a;--h:#f0e442;--hot:#e69f00}"
	"@media(prefers-color-scheme:dark){:root{--ink:#ececec;--soft:#b0b0b0;--line:#454545;--ground:#161616;"
	"--card:#212121;--a:#56b4e9;--b:#ff8a3d;--c:#1fc49a;--f:#2b8fd0;--g:#a0a0a0}}*{box-sizing:border-box}body{"
	"margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,'DejaVu Sans',sans-serif}main{"
	"max-width:1000px;margin:0 auto;padding:24px 20px}h1{font-size:1.7em;line-height:1.2;margin:0 0 4px;"
	"overflow-wrap:anywhere}h1:not(:first-of-type){margin-top:40px}h2{font-size:1.3em;margin:40px 0 4px;"
	"overflow-wrap:anywhere;border-bottom:1px solid var(--line)}h3{font-size:1.05em;margin:0}p{margin:4px 0 10px;"
	"max-width:75ch}.soft,figcaption p,footer,.about{color:var(--soft)}footer{margin-top:40px}figure{margin:26px 0;"
	"break-inside:avoid}figcaption p{margin:0 0 6px}svg{display:block;width:100%;height:auto}svg.defs{"
	"position:absolute;width:0}svg text{fill:var(--soft);font-size:12px}svg text.cell{fill:var(--ink);"
	"font-size:11px;text-anchor:middle}svg text.on{fill:#111}svg .grid{stroke:var(--line);stroke-width:1}.tiles{"
	"display:flex;flex-wrap:wrap;gap:10px;margin:14px 0;padding:0;list-style:none}.tiles li{background:var(--card);"
	"border:1px solid var(--line);border-radius:6px;padding:8px 14px}.tiles b{display:block;font-size:1.25em}"
	".small{display:grid;grid-template-columns:repeat(auto-fill,minmax(280px,1fr));gap:12px 18px}.small figure{"
	"margin:0}.small svg text{font-size:11px}.small h3{font-size:.95em}.l0{stroke:var(--a)}.l1{stroke:var(--b);"
	"stroke-dasharray:7 4}.l2{stroke:var(--c);stroke-dasharray:2 3}.l0,.l1,.l2{fill:none;stroke-width:2;"
	"stroke-linejoin:round}.p.l0{marker:url(#m0)}.p.l1{marker:url(#m1)}.p.l2{marker:url(#m2)}.q.l0{"
	"marker-mid:url(#m0)}.q.l1{marker-mid:url(#m1)}.q.l2{marker-mid:url(#m2)}.k0{fill:var(--a)}.k1{fill:var(--b)}"
	".k2{fill:var(--c)}.k3{fill:var(--d)}.k4{fill:var(--e)}.k5{fill:var(--f)}.k6{fill:var(--g)}.k7{fill:var(--h)}"
	".more{fill-opacity:.5;stroke:var(--ink);stroke-width:.6}.b1{fill:url(#hatch)}.ground{fill:var(--ground)}.hot{"
	"fill:var(--hot)}.none{fill:none;stroke:var(--line)}.top{stroke:var(--ink);stroke-width:1.6}.stall{"
	"fill:var(--soft);fill-opacity:.18}.done{stroke:var(--ink);stroke-width:1.4}.cross{stroke:var(--soft);"
	"stroke-dasharray:3 3}.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:0;padding:0;list-style:none;"
	"font-size:.9em;overflow-wrap:anywhere}.legend svg{display:inline-block;width:26px;height:12px;"
	"margin-right:5px;vertical-align:middle}details{margin:4px 0}summary{cursor:pointer;color:var(--soft);"
	"font-size:.9em}.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85em;"
	"font-variant-numeric:tabular-nums}th,td{padding:2px 10px;text-align:right;border-bottom:1px solid var(--line);"
	"white-space:nowrap}th:first-child,td:first-child{text-align:left;padding-left:0}.warn{"
	"border-left:4px solid var(--b);padding-left:10px}#tip{position:fixed;z-index:9;pointer-events:none;"
	"white-space:pre-line;max-width:340px;padding:6px 9px;border-radius:5px;border:1px solid var(--line);"
	"background:var(--card);color:var(--ink);font-size:13px;line-height:1.35;overflow-wrap:anywhere}#tip[hidden]{"
	"display:none}@media print{:root{color-scheme:light;--ink:#000;--soft:#333;--line:#bbb;--ground:#fff;"
	"--card:#fff;--a:#0072b2;--b:#d55e00;--c:#009e73;--f:#56b4e9;--g:#7a7a7a}body{font-size:11px}main{"
	"max-width:none;padding:0}summary,#tip{display:none}*{print-color-adjust:exact;"
	"-webkit-print-color-adjust:exact}h2,h3{break-after:avoid}figure{margin:14px 0}.small{"
	"grid-template-columns:repeat(3,1fr)}}"
	"@media screen and (max-width:700px){figure{overflow-x:auto}figure>svg{"
	"min-width:680px}.small svg{min-width:0}}";

/* Without "<" and "&", so that it is the same text in HTML and in XML. */
const char report_script[] =
	"(function(){'use strict';var tip=document.getElementById('tip'),cross=null;function hide(){tip.hidden=true;"
	"if(cross){cross.remove();cross=null}}function show(e,text){var x=e.clientX+14,y=e.clientY+14;"
	"tip.textContent=text;tip.hidden=false;if(x+tip.offsetWidth>innerWidth)x=Math.max(0,"
	"e.clientX-14-tip.offsetWidth);if(y+tip.offsetHeight>innerHeight)y=Math.max(0,e.clientY-14-tip.offsetHeight);"
	"tip.style.left=x+'px';tip.style.top=y+'px'}function point(e,svg){var d=svg.dataset,"
	"t=document.getElementById(d.t),b=svg.viewBox.baseVal,r=svg.getBoundingClientRect(),"
	"x=(e.clientX-r.left)/r.width*b.width,n=+d.n,i=Math.floor((x-d.l)/(d.r-d.l)*n);if(0>i||i>=n||!t)return hide();"
	"var row=t.rows[i+1],text=row.cells[0].textContent,k,c;for(k=+d.c;d.e>k;"
	"k++)text+='\\n'+t.rows[0].cells[k].textContent+': '+row.cells[k].textContent;hide();"
	"c=document.createElementNS(svg.namespaceURI,'line');x=+d.l+(i+.5)*(d.r-d.l)/n;c.setAttribute('x1',x);"
	"c.setAttribute('x2',x);c.setAttribute('y1',0);c.setAttribute('y2',b.height);c.setAttribute('class','cross');"
	"c.setAttribute('pointer-events','none');cross=svg.appendChild(c);show(e,text)}"
	"document.addEventListener('pointermove',function(e){"
	"var at=e.target.closest?e.target.closest('g')||e.target:document.body,svg=at.closest('svg[data-t]'),"
	"title=at.querySelector(':scope>title');if(title){if(at.closest('figure')){at.dataset.tip=title.textContent;"
	"at.setAttribute('aria-label',title.textContent);title.remove()}}if(svg)point(e,svg);"
	"else if(at.dataset.tip)show(e,at.dataset.tip);else hide()});document.addEventListener('scroll',hide,{"
	"passive:true})})();";

/* Of the script's SHA-256, in base 64; a test computes it. */
const char report_script_hash[] = "sha256-9e0dQUySPCo/ooVygudc8W6XPpG55jQ79X8HS2w35CQ=";
