"""Plots as SVG, by hand: panels side by side, each with axes from 0, curves or bars, and a legend."""
import math
from xml.sax.saxutils import escape

COLOURS = ["#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f", "#d98324", "#5c6672", "#2a9d8f", "#9a6324"]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 620, 340, 64, 16, 56, 52
POINTS = 800  # more than pixels is not drawn


def tick(top):
    p = 10 ** math.floor(math.log10(top / 5))
    m = top / 5 / p
    return p * (10 if m > 5 else 5 if m > 2 else 2 if m > 1 else 1)


class Panel:
    """curves: [(label, [(x, y)])]. marks: [(label, x)], vertical lines. bars instead of curves: [(label, y)]."""

    def __init__(self, title, x_label, y_label, curves=(), marks=(), bars=(), top=None):
        self.title, self.x_label, self.y_label = title, x_label, y_label
        self.curves, self.marks, self.bars = list(curves), list(marks), list(bars)
        self.top = top

    def draw(self, x0):
        xs = [x for _, c in self.curves for x, _ in c] + [x for _, x in self.marks]
        ys = [y for _, c in self.curves for _, y in c] + [y for _, y in self.bars]
        mx, my = max(xs, default=1) or 1, self.top or max(ys, default=1) or 1

        def px(v):
            return x0 + LEFT + v / mx * (WIDTH - LEFT - RIGHT)

        def py(v):
            return HEIGHT - BOTTOM - v / my * (HEIGHT - TOP - BOTTOM)
        out = [f"<text x='{x0 + LEFT}' y='18' font-size='14'>{escape(self.title)}</text>"]
        t = tick(my)
        for i in range(int(my / t * 1.0001) + 1):
            out.append(f"<line x1='{px(0):.1f}' x2='{px(mx):.1f}' y1='{py(i * t):.1f}' y2='{py(i * t):.1f}' "
                       f"stroke='#ddd'/><text x='{x0 + LEFT - 6}' y='{py(i * t) + 4:.1f}' text-anchor='end'>{i * t:g}</text>")
        t = tick(mx)
        for i in range(int(mx / t * 1.0001) + 1) if not self.bars else ():
            out.append(f"<text x='{px(i * t):.1f}' y='{HEIGHT - BOTTOM + 18}' text-anchor='middle'>{i * t:g}</text>")
        out.append(f"<text x='{(px(0) + px(mx)) / 2:.1f}' y='{HEIGHT - 10}' text-anchor='middle'>{escape(self.x_label)}</text>")
        out.append(f"<text transform='translate({x0 + 14} {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)' "
                   f"text-anchor='middle'>{escape(self.y_label)}</text>")
        for k, (label, points) in enumerate(self.curves):
            colour = COLOURS[k % len(COLOURS)]
            each = len(points) // POINTS + 1
            path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points[::each] + points[-1:])
            out.append(f"<polyline fill='none' stroke='{colour}' stroke-width='1.4' points='{path}'/>")
            at = x0 + LEFT + k % 4 * 138
            out.append(f"<text x='{at}' y='{34 + k // 4 * 14}' fill='{colour}'>{escape(label)}</text>")
        for label, x in self.marks:
            out.append(f"<line x1='{px(x):.1f}' x2='{px(x):.1f}' y1='{TOP}' y2='{py(0):.1f}' stroke='#555' "
                       f"stroke-dasharray='4 3'/><text x='{px(x) - 4:.1f}' y='{TOP + 12}' text-anchor='end'>{escape(label)}</text>")
        wide = (WIDTH - LEFT - RIGHT) / max(1, len(self.bars))
        for k, (label, y) in enumerate(self.bars):
            left = x0 + LEFT + k * wide
            out.append(f"<rect x='{left + wide * 0.15:.1f}' y='{py(min(y, my)):.1f}' width='{wide * 0.7:.1f}' "
                       f"height='{py(0) - py(min(y, my)):.1f}' fill='{COLOURS[0]}'/>"
                       f"<text x='{left + wide / 2:.1f}' y='{py(min(y, my)) - 4:.1f}' text-anchor='middle'>{y:g}</text>"
                       f"<text x='{left + wide / 2:.1f}' y='{HEIGHT - BOTTOM + 18}' text-anchor='middle'>{escape(label)}</text>")
        return out


def write(path, panels):
    out = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH * len(panels)} {HEIGHT}' "
           "font-family='sans-serif' font-size='12'>",
           f"<rect width='{WIDTH * len(panels)}' height='{HEIGHT}' fill='white'/>"]
    for i, p in enumerate(panels):
        out += p.draw(i * WIDTH)
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n".join(out) + "\n</svg>\n")
