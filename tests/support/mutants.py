"""Hand-made mutations of the product: what is wrong in each, and the tests that must notice.

`python -m tests.support.product_mutations` makes them. Each changes one place of one file; its tests are few, so that one costs
seconds. A mutation that nothing can notice has its reason in `survives`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One changed place."""

    name: str
    file: str
    """Below `fp8pass/`."""
    old: str
    """Occurs once in the file."""
    new: str
    tests: str
    """Arguments of pytest: files below `tests/`, and "-k" with what follows it."""
    survives: str = ""
    """Why no test can notice, where none does."""


def _of(file: str, tests: str, *changes: tuple[str, str, str], survives: str = "") -> list[Mutant]:
    return [Mutant(name, file, old, new, tests, survives) for name, old, new in changes]


_STATE = "fp8pass/test_state_edges.py fp8pass/test_stores.py fp8pass/test_state.py"
_FIRST = "fp8pass/test_first_step.py fp8pass/test_state_edges.py"
_RECOMPUTE = (
    "fp8pass/test_recomputation.py fp8pass/test_activation_checkpointing.py lifecycles/test_lifecycles.py"
    " -k recomputation_or_twice_or_oldest_or_reentrant_checkpoint_or_hooks_around_blocks"
)
_KEPT = "fp8pass/test_kept_weights.py fp8pass/test_stale_weights.py -k never_out_of_date_or_boundary_or_frozen_or_instances"
_EXPORT = "fp8pass/export/test_export.py"

MUTANTS: list[Mutant] = [
    # -- runtime
    *_of(
        "runtime/recompute.py",
        "fp8pass/test_saved_tensors.py -k clone_or_NumPy_or_raises",
        ("hooks take everything", "if _storage(tensor) in passed:", "if False:"),
        ("hooks see FP8", "tensor.view(torch.uint8) if is_fp8 else tensor", "tensor"),
        ("hooks take nothing", "value = user_pack(tensor.view(torch.uint8) if is_fp8 else tensor)", "return lambda: tensor"),
    ),
    *_of(
        "rewrite/apply.py",
        "fp8pass/test_activation_checkpointing.py -k budget",
        ("GEMMs may be recomputed", "            never_recompute(out)\n", "            pass\n"),
    ),
    *_of(
        "rewrite/apply.py",
        "fp8pass/test_apply.py -k gaps",
        ("rows cut from batches leave gaps", "has_gaps = cuts[1] or (cuts[0] and first > 0)", "has_gaps = cuts[1]"),
    ),
    *_of(
        "runtime/wrap.py",
        "fp8pass/test_nested.py -k levels_or_alike_or_after_the_first",
        (
            "modules beside a compiled one are left eager",
            "                if module.__dict__.get(CALL) is None:\n",
            "                if False:\n",
        ),
        ("what is compiled later is not seen", "    _num_compiled += 1\n", "    _num_compiled += 0\n"),
        ("unlike modules share code", "_codes.setdefault(repr(module), ", '_codes.setdefault("", '),
    ),
    *_of(
        "runtime/clock.py",
        "fp8pass/test_manual_steps.py",
        ("updates by hand are not seen", "(self._version is not None and version != self._version)", "False"),
        ("compiled optimizers are not seen", "optimizer is None or any(", "any("),
        ("a boundary counts on", "self.num_updates = self.num_forwards = 0", "pass"),
    ),
    *_of(
        "scales/store.py",
        "fp8pass/test_manual_steps.py -k exchanged",
        ("forgotten weights keep their scales", "            self.scale[self.where(name)] = 1\n", ""),
        (
            "forgotten weights are not noted",
            "            self.started.discard(name)\n            self._note_emptied(name)\n",
            "            self.started.discard(name)\n",
        ),
        (
            "the step before is not forgotten",
            "            self.amax_history[:, self.where(name)] = 0\n",
            "            self.amax_history[1:, self.where(name)] = 0\n",
        ),
    ),
    *_of(
        "tools/monitoring.py",
        "fp8pass/test_monitor.py -k under_way",
        ("stop logs nothing", "                own.finish_step()\n", "                pass\n"),
    ),
    # -- state
    *_of(
        "scales/store.py",
        _STATE,
        ("note_empty asks the history alone", " & (self.scale[columns] == 1)", ""),
        (
            "grow forgets the counts",
            "self.fp8_max, self.num_non_finite)\n\n    def take_from",
            "self.fp8_max)\n\n    def take_from",
        ),
        ("take_from forgets the counts", "self.num_non_finite[target] = other.num_non_finite[source].to(self.device)", "pass"),
        ("take_from forgets histories", "self.amax_history[:, target] = other.amax_history[:, source].to(self.device)", "pass"),
        ("slots without the offset", "dtype=torch.int64) - offset", "dtype=torch.int64)"),
        ("one column for a batch", "first += count\n\n    def grow", "first += 1\n\n    def grow"),
    ),
    *_of(
        "scales/store.py",
        _FIRST,
        ("marked marks nothing", "scale.index_fill(0, self._empty_columns[1], 0.0)", "scale"),
        ("one starts as current does", 'self.recipe.initial_scale == "current" and ', ""),
    ),
    *_of(
        "scales/store.py",
        "fp8pass/test_stores.py",
        ("started forgets nothing", "        self.started.clear()\n", ""),
        ("a batch is written by any entry", "if all(list(itertools.islice", "if any(list(itertools.islice"),
    ),
    *_of(
        "scales/store.py",
        "fp8pass/test_recomputation.py fp8pass/test_first_step.py -k boundary_or_recomputation",
        ("frozen scales never thaw", "self._frozen[0] != self.version or ", ""),
    ),
    *_of(
        "scales/store.py",
        _STATE,
        ("a margin of none", "margin=recipe.margin, num_non_finite", "margin=0, num_non_finite"),
        (
            "custom scales ignore max",
            'if recipe.amax_compute_algo == "max" else staged',
            'if recipe.amax_compute_algo == "" else staged',
        ),
    ),
    *_of(
        "scales/shared.py",
        "fp8pass/test_kept_weights.py fp8pass/test_state_edges.py",
        ("a boundary without a version", "store.version += 1\n", "pass\n"),
    ),
    *_of("scales/shared.py", _FIRST, ("staged amaxes are not noted", "store.note_staged()\n", "pass\n")),
    *_of(
        "scales/shared.py",
        "fp8pass/test_shared_boundaries.py",
        ("staged amaxes of others enter the history", "        row.zero_()\n", "        pass\n"),
    ),
    *_of(
        "runtime/clock.py",
        "fp8pass/test_shared_boundaries.py",
        ("a kept graph is over", " or torch._C._autograd._get_current_graph_task_keep_graph()", ""),
        ("two models are one", "self.last_forward > other.last_forward and ", ""),
    ),
    *_of(
        "scales/view.py",
        "fp8pass/test_state.py fp8pass/test_state_checkpoint.py fp8pass/test_state_edges.py",
        ("saved tensors share memory", "getattr(store, part)[..., where].clone()", "getattr(store, part)[..., where]"),
        (
            "staged amaxes of ranks are the last one's",
            "torch.maximum(staged[name], value) if name in staged else value",
            "value",
        ),
        (
            "the first amax of the history is lost",
            "history[0] = torch.maximum(history[0], staged[name].to(history.device))",
            "pass",
        ),
        ("entries of other ranks are read", "elif entry.rank in (None, rank):", "elif True:"),
        ("an entry may be missing", "        if lacking:\n", "        if False:\n"),
        ("any format fits", "if limit not in possible:", "if False:"),
        ("any name fits", "    if missing or unexpected:\n", "    if False:\n"),
        ("restored tensors are not known", "    store.restored.update(unclaimed)\n", ""),
        ("a loaded history is not asked whether it is empty", "    store.note_empty(names)\n", ""),
    ),
    *_of(
        "scales/view.py",
        "fp8pass/test_state_edges.py",
        (
            "load_store keeps the version",
            "    store.note_empty(names)\n    store.version += 1\n",
            "    store.note_empty(names)\n",
        ),
    ),
    *_of(
        "scales/stores.py",
        _STATE,
        ("other devices keep what moved", "                store.take_from(other, moved)\n", ""),
        ("the first recipe owns every name", "next((r for r in recipes if r == recipe), recipes[0])", "recipes[0]"),
        ("the capacity is the model's", "if store.capacity < capacity_for(needed):", "if False:"),
        ("a loaded state may lack a tensor", "            _check_restored(store, names)\n", ""),
    ),
    *_of(
        "scales/reduction.py",
        "distributed/test_amax_reduction.py -k equal_on_all_ranks_or_beyond_or_different_recipes_or_stay_if",
        ("ranks keep their own amaxes", "amaxes = bits[: layout.size].view(torch.float32)", "return"),
        (
            "what is beyond the message is not reduced",
            "        if rest.numel() and _is_agreed(message):\n",
            "        if False:\n",
        ),
        ("recipes may differ", "if any(other != every[0][0] for other, _ in every):", "if False:"),
    ),
    *_of(
        "scales/stores.py",
        _RECOMPUTE,
        ("what must not record does", "amax = window.amax if records is Records.ALL else scratch", "amax = window.amax"),
        ("a repeated run takes today's scales", "            if scales is not None:\n", "            if False:\n"),
    ),
    *_of(
        "scales/stores.py",
        "distributed/test_pipeline.py -k trace",
        ("a dry pass records gradients", "scratch if records is Records.NOTHING else window.amax", "window.amax"),
    ),
    *_of(
        "scales/stores.py",
        _FIRST,
        ("gradients alone never start", "s.marked(s.scale if remembered is None else remembered[s])", "s.marked(s.scale)"),
        survives="scales differ only if step() is called between a checkpointed forward and its backward, in the one step in which"
        " gradients alone have no history",
    ),
    # -- runtime
    *_of(
        "runtime/recompute.py",
        _RECOMPUTE,
        ("the oldest run of an instance", "return runs.pop() if runs else None", "return runs.pop(0) if runs else None"),
        (
            "no forward is checkpointed",
            "    if _top_hooks(True) is not None:\n        return True\n",
            "",
        ),
        ("reentrant runs are not known", "    if torch.is_grad_enabled():\n        return False\n", "    return False\n"),
    ),
    *_of("inputs.py", _RECOMPUTE, ("a backward is none", "return torch._C._current_graph_task_id() != -1", "return False")),
    *_of(
        "runtime/recompute.py",
        "fp8pass/test_records.py",
        ("a used run stays", "        if run in owned:\n            owned.remove(run)\n", ""),
    ),
    *_of(
        "runtime/recompute.py",
        _RECOMPUTE,
        (
            "a run is repeated twice",
            "_alive(found.pop(owner, None))",
            "_alive(found.get(owner))",
        ),
        survives="while its memory lives, the run of that memory is the right one however often it is asked for",
    ),
    *_of(
        "runtime/frame.py",
        _RECOMPUTE,
        ("recomputation always records", "(trains if first is None else not first.recorded)", "trains"),
        ("recomputation never records", "(trains if first is None else not first.recorded)", "False"),
        ("the first run's graph is forgotten", "variants if first is None else variants | first.variants", "variants"),
    ),
    *_of(
        "runtime/frame.py",
        "fp8pass/test_records.py",
        ("evaluations record", "may_record = trains and instance.records", "may_record = instance.records"),
        (
            "quiet evaluations record",
            "quiet.tensors(args, Records.BACKWARD, variants)",
            "quiet.tensors(args, Records.ALL, variants)",
        ),
    ),
    *_of(
        "scales/stores.py",
        "fp8pass/test_records.py",
        ("growth is not seen", "if store.layout != layout:", "if False:"),
    ),
    *_of(
        "scales/stores.py",
        "fp8pass/test_state_edges.py",
        ("tensors that were one share a scale for good", "            store.part(names)\n", ""),
    ),
    *_of(
        "runtime/frame.py",
        "fp8pass/test_lifecycle.py -k dynamo_holds",
        ("variants are traced without torch's lock", "with compile_lock, _is_compiling(), context:", "with context:"),
    ),
    *_of(
        "runtime/clock.py",
        "fp8pass/test_step_boundaries.py fp8pass/test_by_name.py",
        ("steps end though manual", 'return self.mode == "auto" and not self.at_graphs and', "return not self.at_graphs and"),
        ("an inner forward ends a step", "not self.at_graphs and self.is_outermost() and", "not self.at_graphs and"),
        ("an evaluation ends a step of ranks", "ends_steps = trains or not self.must_agree", "ends_steps = True"),
        (
            "a recomputation is outermost",
            "return not self._num_forwards() and not in_backward()",
            "return not self._num_forwards()",
        ),
        (
            "graphs end steps without a backward",
            "self.at_graphs and trains and self.went_backward and",
            "self.at_graphs and trains and",
        ),
        (
            "a boundary leaves the step pending",
            "self.recorded = self.trained = self.went_backward = pending",
            "self.recorded = pending",
        ),
    ),
    *_of(
        "runtime/session.py",
        "distributed/test_tried.py -k without_training",
        ("every boundary is a step", "self.num_steps += is_step", "self.num_steps += 1"),
    ),
    *_of(
        "runtime/session.py",
        "fp8pass/test_use_rules.py fp8pass/test_graph_breaks.py",
        (
            "a schedule begins at once",
            "scheduled = dict(self.options.later_rules).get(self.num_steps)",
            "scheduled = dict(self.options.later_rules).get(self.num_steps + 1)",
        ),
        (
            "resumed rules are the first",
            "            if step <= num_steps:\n                self._switch(rules)\n",
            "            pass\n",
        ),
        (
            "rules may differ in one graph",
            "if rules.recipe_for(module, record.role) != rules.recipe_for(record.module, record.role):",
            "if False:",
        ),
    ),
    *_of(
        "runtime/instances.py",
        "fp8pass/test_graph_breaks.py fp8pass/test_names.py fp8pass/test_lifecycle.py",
        ("instances have one name", 'return f"{variable}#{known}" if known else variable', "return variable"),
    ),
    *_of(
        "runtime/instances.py",
        "fp8pass/test_names.py -k wrappers",
        ("wrappers stay in names", "    if not wrapped:\n        return path\n", "    return path\n"),
    ),
    # -- weights
    *_of(
        "weights/cache.py",
        _KEPT,
        (
            "any origin is fresh",
            "return weight.is_made_of(origin) and (origin is RELEASED",
            "return weight.made is not None and (origin is RELEASED",
        ),
        ("scales may be of another time", "origin is RELEASED or weight.time == scales.time(weight.store)", "True"),
        (
            "equal scales are not asked for",
            "(held == _selected([w for w, _ in weights], scales.values(store)))",
            "(held == held)",
        ),
        ("steps renew nothing", "        self._renewals[0] += 1\n", ""),
        (
            "a repeated call reads today's copies",
            "if w.made is not None and (w in equal or self._is_fresh(w, k, scales))}",
            "if w.made is not None}",
        ),
    ),
    *_of(
        "weights/cache.py",
        _KEPT,
        ("versions are not compared", "version = -1 if parameter.is_inference() else parameter._version", "version = -1"),
        ("addresses are not compared", "storage._cdata, parameter.data_ptr(),", "storage._cdata, 0,"),
        ("frozen weights are renewed as trained ones", "renewals[0 if parameter.requires_grad else 1]", "renewals[1]"),
        ("a new layout keeps the old copies", "            self.made = None\n\n    def forget", "\n    def forget"),
    ),
    *_of(
        "weights/releases.py",
        "fp8pass/test_release_frozen.py fp8pass/test_state_edges.py -k equal_or_other_readers_or_train_or_evaluation_first_or_may_change_or_embedding",
        ("a weight that a graph reads is released", "        if id(parameter) in self._readers:\n", "        if False:\n"),
        (
            "an embedding is released",
            "if root is not None and any(isinstance(m, nn.Embedding) and m.weight is parameter for m in root.modules()):",
            "if False:",
        ),
        ("a scale that may change is released", "return torch.equal(own.reshape(-1), made.scale.reshape(-1))", "return True"),
        (
            "released before a backward has run",
            "if not any(w.trains for w in weights) and root is not None and",
            "if False and root is not None and",
        ),
    ),
    *_of(
        "weights/releases.py",
        "fp8pass/test_release_frozen.py fp8pass/test_state_edges.py -k equal_or_other_readers_or_train_or_evaluation_first_or_may_change_or_embedding",
        (
            "a trained weight is released",
            '        if parameter.requires_grad:\n            return Reason(ReasonKind.READERS, "it trains")\n',
            "",
        ),
        survives="only weights that no graph trains get there, and within a call none changes whether it asks for gradients",
    ),
    *_of(
        "weights/gathered.py",
        "distributed/test_fsdp2_gather.py -k no_bit_changes_or_other_orders",
        ("a backward takes the next scale", "if self._scale is not None and in_backward():", "if False:"),
        (
            "a gather of two steps travels in FP8",
            "bool(group._reshard_after_forward) and not self._is_of_another_step",
            "bool(group._reshard_after_forward)",
        ),
        (
            "the backward finds an old copy",
            "self._lay_out(self._wanted, *self._encoded(whole))",
            "pass",
        ),
    ),
    *_of(
        "rewrite/gathers.py",
        "fp8pass/test_plan_gathers.py -k what_travels_or_addend_or_as_it_is",
        ("readers in high precision are not asked for", "    if reader is not None:\n", "    if False:\n"),
        ("an addend is no reader", "roots + ([] if addend is None else [addend])", "roots"),
        ("bytes are not counted", "elif num_bytes >= value_of(gather.wait).element_size():", "elif False:"),
    ),
    *_of(
        "graph/gathers.py",
        "fp8pass/test_plan_gathers.py",
        ("NaN is lost between ranks", "amax, torch.int32)", "amax, torch.float32)"),
        (
            "gathers of another kind are merged",
            "_hashable(tuple(kwargs.items())), recomputation_of(node))",
            "_hashable(tuple(kwargs.items())))",
        ),
    ),
    # -- export
    *_of(
        "tools/export/formats.py",
        _EXPORT,
        (
            "static input scales are called dynamic",
            "is_dynamic = of_input and kind is not ScaleKind.STATIC",
            "is_dynamic = of_input",
        ),
        ("weights are called dynamic", "is_dynamic = of_input and", "is_dynamic ="),
        ("fp8 is always dynamic", '"static" if scheme.kind is ScaleKind.STATIC else "dynamic"', '"dynamic"'),
        ("ragged blocks are written", "if scheme.kind is ScaleKind.BLOCK and (rows % BLOCK or columns % BLOCK):", "if False:"),
        ("names match others", "is_plain and any(is_skipped", "is_plain and not any(is_skipped"),
        (
            "scales of powers of two are floats",
            "            return scale.to(torch.float8_e8m0fnu)\n",
            "            return scale\n",
        ),
        ("everything is ignored", '"ignore": _exact(kept)', '"ignore": []'),
    ),
    *_of(
        "tools/export/contents.py",
        _EXPORT,
        ("input scales are not inverted", "inputs.reciprocal()", "inputs"),
        ("tied names are written twice", "if name not in tied and name not in ignored", "if name not in ignored"),
    ),
    *_of(
        "tools/export/contents.py",
        "fp8pass/export/test_loaders.py -k projections_share",
        (
            "a scale for all, of the weight alone",
            "torch.stack([lowering.amax(weight), *amaxes]).amax()",
            "lowering.amax(weight)",
        ),
    ),
    *_of(
        "tools/export/weights.py",
        _EXPORT,
        ("embeddings are written in FP8", "    if is_embedding:\n", "    if False:\n"),
        (
            "any of several inputs' scales",
            "if len({(_column(read.weight_scale), _column(read.input_scale)) for read in kept}) > 1:",
            "if False:",
        ),
        (
            "an input without a scale is written",
            "if kept[0].input_scale is not None and kept[0].input_scale.is_empty:",
            "if False:",
        ),
        ("weights that are stored turned", "    if record.is_turned:\n", "    if False:\n"),
    ),
    *_of(
        "schemes/eager.py",
        _EXPORT,
        (
            "no margin for weights with an empty history",
            "scale = lowering.scale_from_amax(amax, quantization.dtype, margin=quantization.margin)",
            "scale = lowering.scale_from_amax(amax, quantization.dtype, margin=0)",
        ),
        (
            "scales as they multiply",
            "return lowering.quantize(matrix, scale, quantization.dtype), scale.reciprocal()",
            "return lowering.quantize(matrix, scale, quantization.dtype), scale",
        ),
    ),
    # -- recipes and rewriting
    *_of(
        "recipes/current.py",
        "fp8pass/test_recipes.py fp8pass/test_state_edges.py",
        ("the smallest amax is not passed on", ", epsilon=self.amax_epsilon", ""),
    ),
]
