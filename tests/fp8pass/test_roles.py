"""Roles of gradient GEMMs: the table of cases, each derived by hand from d(a @ b) = da @ b + a @ db."""

from torch import fx

from fp8pass.graph.gemms import GemmSite
from fp8pass.graph.values import MatrixValue, Operand
from fp8pass.rewrite.discover import mate_and_role
from tests.support.cases import each

GRADIENT_LEFT, GRADIENT_RIGHT = (True, False), (False, True)
M, K, N = 16, 32, 48


class Sites:
    """Forward GEMMs named by text: "y = x @ w:weight". Values of one name are one value."""

    def __init__(self, *texts: str):
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.forward = [self._site(text) for text in texts]

    def value(self, name: str, rows: int = K, cols: int = K) -> MatrixValue:
        node = self.nodes.get(name) or self.nodes.setdefault(name, self.graph.placeholder(name))
        return MatrixValue(node, rows, cols)

    def _site(self, text: str) -> GemmSite:
        result, product = text.split(" = ")
        operands = []
        for operand in product.split(" @ "):
            name, _, kind = operand.partition(":")
            operands.append(Operand(self.value(name), False, kind or "input"))
        node = self.nodes.setdefault(result, self.graph.placeholder(result))
        return GemmSite(node, "m", None, "output", M, N, K, "", tuple(operands), False)

    def find(self, known, is_gradient, mates=(), taken=(), *shape):
        """(result of the forward GEMM, role)."""
        sites = {site.node.name: site for site in self.forward}
        value = None if known is None else self.value(known)
        held = {(sites[name].node, role) for name, role in taken}
        before = set(held)
        mate, role = mate_and_role(value, is_gradient, [sites[m] for m in mates], self.forward, held, *shape)
        assert held == before, "what is taken is the caller's business"
        return None if mate is None else mate.node.name, role


TABLE = {
    # (forward GEMMs), known operand, which operands are gradients, mates, taken -> forward GEMM, role
    "weight on the right, gy @ w.T": (["y = x @ w:weight"], "w", GRADIENT_LEFT, ["y"], [], ("y", "grad_input")),
    "weight on the right, x.T @ gy": (["y = x @ w:weight"], "x", GRADIENT_RIGHT, ["y"], [], ("y", "grad_weight")),
    "weight on the right, gy.T @ x": (["y = x @ w:weight"], "x", GRADIENT_LEFT, ["y"], [], ("y", "grad_weight")),
    "weight on the left, w.T @ gy": (["y = w:weight @ x"], "w", GRADIENT_RIGHT, ["y"], [], ("y", "grad_input")),
    "weight on the left, gy @ x.T": (["y = w:weight @ x"], "x", GRADIENT_LEFT, ["y"], [], ("y", "grad_weight")),
    "two activations, gy @ b.T": (["y = a @ b"], "b", GRADIENT_LEFT, ["y"], [], ("y", "grad_input")),
    "two activations, a.T @ gy": (["y = a @ b"], "a", GRADIENT_RIGHT, ["y"], [], ("y", "grad_weight")),
    "two weights, gy @ b.T": (["y = a:weight @ b:weight"], "b", GRADIENT_LEFT, ["y"], [], ("y", "grad_input")),
    "two weights, a.T @ gy": (["y = a:weight @ b:weight"], "a", GRADIENT_RIGHT, ["y"], [], ("y", "grad_weight")),
    "a matrix by itself, first": (["y = x @ x"], "x", GRADIENT_LEFT, ["y"], [], ("y", "grad_input")),
    "a matrix by itself, then": (["y = x @ x"], "x", GRADIENT_RIGHT, ["y"], [("y", "grad_input")], ("y", "grad_weight")),
    # A frozen weight's grad_weight is no GEMM of the graph; the other gradient does not depend on that.
    "frozen weight": (["y = x @ w:weight", "z = y @ v:weight"], "v", GRADIENT_LEFT, ["z"], [], ("z", "grad_input")),
    "shared weight, its own GEMM by seq_nr": (
        ["y = x @ w:weight", "z = y @ w:weight"], "w", GRADIENT_LEFT, ["z"], [], ("z", "grad_input"),
    ),
    "shared weight without seq_nr, the first": (
        ["y = x @ w:weight", "z = y @ w:weight"], "w", GRADIENT_LEFT, [], [], ("y", "grad_input"),
    ),
    "shared weight without seq_nr, then the second": (
        ["y = x @ w:weight", "z = y @ w:weight"], "w", GRADIENT_LEFT, [], [("y", "grad_input")], ("z", "grad_input"),
    ),
    "shared input, its own GEMM by seq_nr": (
        ["q = x @ wq:weight", "k = x @ wk:weight"], "x", GRADIENT_RIGHT, ["k"], [], ("k", "grad_weight"),
    ),
    "a role that is taken leaves the other role of its GEMM": (
        ["y = x @ w:weight"], "x", GRADIENT_RIGHT, ["y"], [("y", "grad_input")], ("y", "grad_weight"),
    ),
    "seq_nr of a GEMM that did not read it": (
        ["y = x @ w:weight", "z = y @ v:weight"], "w", GRADIENT_LEFT, ["z"], [], ("y", "grad_input"),
    ),
    "everything taken": (
        ["y = x @ w:weight"], "w", GRADIENT_LEFT, ["y"], [("y", "grad_input")], ("y", "grad_input"),
    ),
    "nobody read it, gradient on the left": (["y = x @ w:weight"], "new", GRADIENT_LEFT, [], [], (None, "grad_input")),
    "nobody read it, gradient on the right": (["y = x @ w:weight"], "new", GRADIENT_RIGHT, [], [], (None, "grad_weight")),
    "nobody read it, but its seq_nr is known": (["y = x @ w:weight"], "new", GRADIENT_RIGHT, ["y"], [], ("y", "grad_weight")),
    "not clear what it reads": (["y = x @ w:weight"], None, GRADIENT_RIGHT, ["y"], [], ("y", "grad_weight")),
    "not clear what it reads, no operands": (["y = x @ w:weight"], None, (), [], [], (None, "grad_input")),
    # Second derivatives: both operands depend on a gradient, so only its own seq_nr tells.
    "two gradients": (["y = x @ w:weight"], "w", (True, True), [], [], (None, "grad_input")),
    "two gradients, seq_nr known": (["y = x @ w:weight"], "w", (True, True), ["y"], [], ("y", "grad_input")),
}  # fmt: skip


#: Gradients of `y = x @ w`, and of `y = w @ x`, whose other operand the backward has made anew, such as by another gather:
#: which operand is the gradient, whether it is transposed, the size that is summed over -> roles for the two.
MADE_ANEW = {
    "gy @ w.T": (GRADIENT_LEFT, False, N, "grad_input", "grad_weight"),
    "w @ gy.T": (GRADIENT_RIGHT, True, N, "grad_input", "grad_weight"),
    "x.T @ gy": (GRADIENT_RIGHT, False, M, "grad_weight", "grad_input"),
    "gy.T @ x": (GRADIENT_LEFT, True, M, "grad_weight", "grad_input"),
    "gy.T @ x, whose gradient is stored transposed": (GRADIENT_LEFT, False, M, "grad_weight", "grad_input"),
    "gy.T @ x, of a size that tells nothing": (GRADIENT_LEFT, True, None, "grad_weight", "grad_input"),
}


@each("case", MADE_ANEW)
def test_an_operand_that_the_backward_has_made_anew(case):
    is_gradient, is_transposed, k, *roles = MADE_ANEW[case]
    for forward, role in zip(("y = x @ w:weight", "y = w:weight @ x"), roles, strict=True):
        assert Sites(forward).find("new", is_gradient, ["y"], [], is_transposed, k) == ("y", role)
        both = Sites(forward, "z = x @ v:weight").find("new", is_gradient, ["y", "z"], [("y", role)], is_transposed, k)
        assert both[0] == "z", "a role of a GEMM is taken once"


@each("case", TABLE)
def test_table(case):
    forward, known, is_gradient, mates, taken, expected = TABLE[case]
    assert Sites(*forward).find(known, is_gradient, mates, taken) == expected
