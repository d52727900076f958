"""Mutants of the guards: one line of the sources made wrong, and the tests that must turn red."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One line made wrong.

    Attributes:
        guard: what the line does, in words.
        file: where it is.
        old, new: what replaces what; `old` is there once.
        tests: selectors of `tests.trust` that must turn red.
    """

    guard: str
    file: str
    old: str
    new: str
    tests: str


CHANGE, CHECKED, BUILT = (f"fusedvit/checks/{name}.py" for name in ("change_detection", "checked_tower", "as_built"))
FALLBACK, ARGUMENTS = "fusedvit/checks/fallback.py", "fusedvit/checks/arguments.py"
WALK, FOUND, HELD = (f"fusedvit/checks/own_code/{name}.py" for name in ("walk", "findings", "instances"))
TORCHS, LOOKED_UP, CODE = (f"fusedvit/checks/own_code/{n}.py" for n in ("torch_names", "registries", "tower_code"))
ADAPTERS, ACCELERATE = "fusedvit/checks/adapters.py", "fusedvit/checks/accelerate_hooks.py"
SOURCE, RECORDED = "fusedvit/checks/source_code.py", "fusedvit/checks/recorded.py"
IN_HOOKS = "fusedvit/checks/forward_hooks.py"
CALLS, OWNERS = "fusedvit/checks/module_calls.py", "fusedvit/checks/ownership.py"
CACHE, REPLAY, READ = (f"fusedvit/runtime/{name}.py" for name in ("weight_cache", "speculative_replay", "readback"))
RUNNER, ENCODER = "fusedvit/runtime/runner.py", "fusedvit/fused_encoder.py"
ATTEMPTS = "fusedvit/calls/attempts.py"
PREPARED, OWN = "fusedvit/prepared_tower.py", "fusedvit/checks/own_forward.py"
COPIES, PARALLEL = "fusedvit/tower_copies.py", "fusedvit/data_parallel.py"
PREPARE, DIGEST = "fusedvit/model/prepare_weights.py", "fusedvit/model/digest.py"
RANGE = "fusedvit/model/fp16_range.py"
LAZY, UNREAD = "fusedvit/outputs/lazy.py", "fusedvit/outputs/unread.py"
API, LIMITS = "fusedvit/api.py", "graphs/limits.py"
MANAGER, CAPTURED = "graphs/manager.py", "fusedvit/runtime/captured_encoder.py"
JOB, SHARDS = "fusedvit/corpus/job.py", "fusedvit/corpus/shards.py"
CONSOLE, ENDING, EMBED, ON_RAY = (f"fusedvit/{n}.py" for n in ("cli/console", "cli/ending", "cli/embed", "serving/ray"))
LOAD, EPILOGUE, NORMS, PRINT = (f"kernels/{n}.py" for n in ("load_inputs", "epilogue", "norms", "fingerprint"))
REFERENCE, TABLE = "kernels/reference/linear.py", "kernels/tuning_table.py"
MEDIA, FORMATS, PROCESSORS = (f"fusedvit/pixels/{name}.py" for name in ("media", "formats", "processors"))
COMPILED, LAUNCH = "fusedvit/runtime/compiled_kernels.py", "kernels/launch.py"
SERVICE, WORKER = (f"fusedvit/runtime/compile_{name}.py" for name in ("service", "worker"))
_UNCHANGED = "            and "  # a clause of `Snapshot.unchanged`


def _clause(guard: str, clause: str, tests: str, file: str = CHANGE) -> Mutant:
    return Mutant(guard, file, f"{_UNCHANGED}{clause}\n", "", tests)


def _never(guard: str, file: str, condition: str, tests: str) -> Mutant:
    return Mutant(guard, file, f"if {condition}:", "if False:", tests)


def _without(guard: str, file: str, text: str, tests: str) -> Mutant:
    return Mutant(guard, file, text, "", tests)


MUTANTS = (
    # what is compared at a call
    _without("children", CHANGE, "self.children.unchanged()\n            and ", "hf/changes"),
    _clause(
        "lengths of registries",
        "list(map(len, self.registries)) == self.lengths",
        "hf/changes hf/numbers:a_module",
    ),
    _clause("order of lists", "list(map(tuple, self.orders[0])) == self.orders[1]", "hf/changes"),
    _without(
        "entries of instances",
        RECORDED,
        "list(map(len, self.live)) == self.lengths\n            and ",
        "unit/recorded:attributes_that_come",
    ),
    _never(
        "dictionaries of instances",
        CHANGE,
        "not all(map(is_, map(vars, self.classed), self.homes))",
        "hf/changed_in_place:another_dict",
    ),
    _without("what was written", CHANGE, " and versions == self.written.versions", "hf/changes"),
    _without("registries that were empty", CHANGE, " and not any(self.empty)", "hf/changed_in_place:what_a_tower"),
    _clause("what hides a tower's", "self.hidden[0].isdisjoint(self.hidden[1])", "hf/changed_in_place:what_a_tower"),
    _without(
        "versions that count little",
        RECORDED,
        " or (way(), _version_of_dictionary(written))[1] == before",
        "unit/recorded:versions",
    ),
    _never("ends of epochs", RECORDED, "number != self._last + 1", "unit/recorded:dictionaries_are"),
    _clause("registries of instances", "self.registries.unchanged()", "hf/changed_in_place:what_a_tower", RECORDED),
    _clause(
        "hooks",
        "not any(map(fires, filter(None, self.instances.hooks), repeat(self.embedding)))",
        "hf/fallback:removed_hook hf/fallback:hooks_that",
    ),
    _clause("classes", "list(map(type, self.classed)) == self.classes", "hf/changes"),
    _clause("buffers that want gradients", "not self.buffers.wants_gradients()", "hf/numbers:a_buffer_that_wants"),
    _clause(
        "what decorators wrap",
        "all(map(is_, map(_held_by, self.wrapped[0]), self.wrapped[1]))",
        "hf/own_code:ways_to_replace",
    ),
    _without("layouts", RECORDED, "self.layouts.unchanged() and ", "hf/layouts"),
    _never("layouts that guards doubt", RECORDED, "_facts(self._tensors) != self._facts", "hf/layouts"),
    _without("what guards see", RECORDED, " and guard.check(*self._tensors)", "hf/layouts"),
    _without("guards that see little", RECORDED, " and not any(map(guard.check, others))", "unit/recorded:guards_that"),
    _clause("attributes", "self.attributes.unchanged()", "hf/numbers:every_attribute_that"),
    _clause("lists and dictionaries", "self.attributes.hold_the_same()", "hf/numbers:every_attribute_that"),
    _clause("parameters", "self.parameters.unchanged()", "hf/layouts"),
    _clause("buffers", "self.buffers.unchanged()", "hf/weights:unwatched_buffers"),
    _clause("addresses of buffers", "self.buffers.in_place()", "hf/numbers:every_attribute"),
    _clause("code", "self.code.unchanged()", "hf/own_code:every_function"),
    _without("dtypes", RECORDED, '    attrgetter("dtype"),\n', "hf/fallback:a_dtype"),
    _without(
        "versions",
        RECORDED,
        " and list(map(_version_of, self.counted)) == self.versions",
        "hf/weights:answer hf/weights:unwatched",
    ),
    _clause("attention registries", "self.registries.unchanged()", "hf/own_code:entries"),
    _clause("bodies of functions", "self.bodies.unchanged()", "hf/own_code:ways"),
    _without(
        "defaults of another type", RECORDED, " and self._have_defaults(referents)", "unit/recorded:functions_that"
    ),
    _without("defaults that change", RECORDED, ', "__defaults__"', "hf/own_code:ways"),
    Mutant("pre-hooks", RECORDED, ', "_forward_pre_hooks")', ",)", "hf/fallback:hooks"),
    Mutant("training mode", CHANGE, "for module in dropouts(tower))", "for module in ())", "hf/numbers:dropout"),
    Mutant(
        "shadows of attributes",
        CHANGE,
        "_attributes(m) & own.names}",
        "()}",
        "hf/numbers:every_attribute_that hf/own_code:ways",
    ),
    Mutant(
        "the chosen attention",
        CHANGE,
        '("_attn_implementation_internal", CAUSAL)',
        "(CAUSAL,)",
        "hf/own_code:an_att",
    ),
    Mutant("LoRA's state", CHANGE, "yield from adapters.slots_read(module)", "pass", "hf/adapters:what_can"),
    Mutant(
        "accelerate's hooks",
        CHANGE,
        "accelerate_hooks.slots_read(module) if",
        "() if",
        "hf/accelerate:a_hook_that hf/accelerate:unhooked",
    ),
    # what is asked before weights are prepared
    _never("hooks on inner modules", CHECKED, "path", "hf/changes:a_changed"),
    _never("the tower's class", CHECKED, "foreign", "hf/own_code:remote"),
    _never("adapters of other kinds", CHECKED, "adapter", "hf/adapters:other hf/adapters:what"),
    Mutant(
        "parameters' shapes",
        CHECKED,
        " or self.wrong_parameters(plain, family, spec)",
        "",
        "hf/numbers:a_param hf/changes",
    ),
    _without(
        "the config's numbers",
        CHECKED,
        "wrong_spec(tower, family, spec) or ",
        "hf/numbers:every_attribute hf/changes",
    ),
    Mutant(
        "modules",
        CHECKED,
        "wrong = wrong_modules(plain, built, self.family, self.spec)",
        'wrong = ""',
        "hf/changes",
    ),
    _never("foreign code", CHECKED, "self._code.foreign", "hf/own_code:every_function"),
    _never("freed parameters", CHECKED, "freed", "hf/memory:freed"),
    Mutant(
        "parameters that are not dense",
        ADAPTERS,
        "dense = p.is_contiguous() or",
        "dense = True or",
        "hf/changes",
    ),
    Mutant(
        "attributes as built",
        CHECKED,
        "wrong = wrong_attributes(plain, built, self.family, self.spec, self._code)",
        'wrong = ""',
        "hf/numbers:every_attribute_that",
    ),
    Mutant(
        "buffers as built",
        CHECKED,
        "wrong = wrong_buffers(self.tower, self.family, self.spec, self._code.names)",
        'wrong = ""',
        "hf/changes",
    ),
    _never("buffers that are missing", BUILT, "buffer is None", "hf/changes"),
    _never(
        "buffers of another class", BUILT, "type(buffer) is not torch.Tensor", "hf/changed_in_place:what_a_tower_holds"
    ),
    _never("what an attribute hides", BUILT, "hidden", "hf/changes"),
    _never("function modes", "fusedvit/checks/transforms.py", "found is not None", "hf/transforms:transforms"),
    Mutant(
        "the inverse root of merged rows",
        EPILOGUE,
        "PER_LENGTH: tl.constexpr = (LENGTH + WIDTH - 1) // WIDTH\n    offs = tl.arange(0, CHUNK)\n    squares",
        "PER_LENGTH: tl.constexpr = PARTS\n    offs = tl.arange(0, CHUNK)\n    squares",
        "kernels/linear kernels/epilogue",
    ),
    Mutant("several dtypes", CHECKED, "p.dtype != dtype)", "False)", "hf/fallback:several"),
    Mutant(
        "GELU's approximate",
        BUILT,
        "if approximate is not None and",
        "if False and",
        "hf/numbers:an_engine",
    ),
    _without(
        "num_grid_per_side",
        BUILT,
        '    "num_grid_per_side": lambda spec: spec.position_side,\n',
        "hf/numbers:an_engine",
    ),
    _never("dropout in training mode", BUILT, 'own.get("training", True) and own.get(DROPOUT)', "hf/numbers:dropout"),
    Mutant(
        "an activation's limit", BUILT, 'everywhere["swiglu_limit"] = spec.glu_limit', "pass", "hf/numbers:an_engine"
    ),
    Mutant(
        "methods on instances",
        BUILT,
        "if path and name in names and callable",
        "if False and callable",
        "hf/numbers:an_engine",
    ),
    Mutant(
        "functions of modules", WALK, "self._follow_global(sys.modules", "id(sys.modules", "hf/own_code:every_function"
    ),
    Mutant(
        "functions of torch",
        WALK,
        "        self.torch_names.follow_module(module, mentioned)",
        "        pass",
        "hf/own_code:ways hf/own_code:every_f",
    ),
    _never(
        "the attention function",
        LOOKED_UP,
        "expected is None or definition_of(found) != expected",
        "hf/own_code:an_att",
    ),
    Mutant(
        "classes of torch's wrappers",
        OWNERS,
        " and not c.__module__.startswith(_WRAPPING))",
        ")",
        "hf/handles:a_sharded",
    ),
    Mutant(
        "accelerate's offload",
        ACCELERATE,
        '"AlignDevicesHook" or hook.offload',
        '"AlignDevicesHook"',
        "hf/accelerate:parameters_put",
    ),
    Mutant(
        "LoRA's dropout", ADAPTERS, "(dropout.training and dropout.p)", "False", "hf/adapters:what hf/adapters:adapters"
    ),
    Mutant(
        "merged adapters",
        ADAPTERS,
        "if layer._disable_adapters or layer.merged_adapters:",
        "if layer._disable_adapters:",
        "hf/adapters",
    ),
    Mutant(
        "what calling an instance runs",
        CALLS,
        "vars(module).keys() & OF_INSTANCES",
        "()",
        "hf/own_code:what_calling hf/adapters:the_call",
    ),
    Mutant("backends of others", CALLS, "ours = type(backend) is", "ours = None is not", "hf/own_code:what_calling"),
    Mutant("passes over a compiled graph", CALLS, "isinstance(option, _PLAIN)", "True", "hf/own_code:a_pass"),
    Mutant(
        "whose call was compiled",
        CALLS,
        "_is_call_of(compiled_by_torch(value), module)",
        "compiled_by_torch(value) is not None",
        "hf/own_code:what_calling",
    ),
    Mutant(
        "compiled calls of classes", FOUND, '("forward", *CALL)', '("forward", *CALL[:3])', "hf/own_code:a_compiled"
    ),
    Mutant(
        "functions of C behind torch's",
        TORCHS,
        "                self._follow_names_of(module, mentioned & functions_of_c(module))",
        "                pass",
        "hf/own_code:functions_of_c",
    ),
    Mutant(
        "what stands before them", TORCHS, "sorted(names & vars(torch._VF).keys())", "()", "hf/own_code:what_stands"
    ),
    _never(
        "methods of parameters",
        TORCHS,
        "name in vars(torch.nn.Parameter)",
        "hf/own_code:a_method_of_parameters",
    ),
    Mutant("what prepares weights on a GPU", CODE, "on_cpu or ours.foreign", "on_cpu", "hf/own_code:on_a_gpu"),
    Mutant("what PEFT's layers run", CODE, "found.foreign or layers.foreign", "found.foreign", "hf/adapters"),
    Mutant(
        "what accelerate's hooks run", ACCELERATE, "and _runs_accelerates(hook) ", "", "hf/accelerate:what_accelerates"
    ),
    Mutant(
        "classes of accelerate's hooks", CHANGE, "accelerate_hooks.hooks_of(m)))", "()))", "hf/accelerate:what_accel"
    ),
    Mutant(
        "hooks that lie", IN_HOOKS, "function.__code__ is _capturing_code(function)", "True", "hf/fallback:hooks_that"
    ),
    _never(
        "parameters without a shape",
        BUILT,
        "not isinstance(found, torch.Tensor) or nn.parameter.is_lazy(found)",
        "hf/fallback:parameters_that",
    ),
    _never("blocks compiled as modules", BUILT, "compiled", "hf/compiled:a_block"),
    # what keeps its identity, or is found first
    Mutant("defaults of functions", SOURCE, "not _has_its_defaults(value)", "False", "hf/changed_in_place:what_every"),
    _never(
        "decorators",
        WALK,
        "not _is_of_source(wrapper, decorators)",
        "hf/changed_in_place:what_every hf/changed_in_place:deco",
    ),
    Mutant(
        "contexts of decorators",
        WALK,
        "return sets_gradients(wrapper)",
        "return True",
        "hf/changed_in_place:what_every",
    ),
    _never(
        "bases of classes",
        WALK,
        'not home.__module__.startswith(("torch.", *self.engine.packages))',
        "hf/changed_in_place:a_base",
    ),
    _never("descriptors", HELD, "first and value is not None", "hf/changed_in_place:what_every"),
    Mutant("properties", HELD, "walk.follow_method(of, name)", "pass", "hf/own_code_objects:objects_in"),
    Mutant(
        "caches that lie",
        OWNERS,
        "any(held is inner for held in gc.get_referents(value))",
        "True",
        "hf/own_code_objects:a_cache",
    ),
    Mutant(
        "objects to call", OWNERS, "return callable(value) or root", "return root", "hf/own_code_objects:objects_in"
    ),
    Mutant(
        "lookups of a registry",
        LOOKED_UP,
        '_ASKED = ("get_interface", "__getitem__"',
        '_ASKED = ("get_interface"',
        "hf/changed_in_place:what_every",
    ),
    _without("masks", LOOKED_UP, "    _follow_masks(walk, next(iter(modules)))\n", "hf/changed_in_place:what_is_read"),
    Mutant(
        "names read by strings",
        SOURCE,
        "isinstance(c, str) and c.isidentifier()",
        "False",
        "hf/changed_in_place:what_is_read",
    ),
    Mutant("is_causal of the config", BUILT, "    if causal:", "    if False:", "hf/changed_in_place:what_is_read"),
    Mutant(
        "bodies of torch's functions",
        FOUND,
        "            self.functions.setdefault(id(value), value)",
        "            pass",
        "hf/changed_in_place:what_every",
    ),
    Mutant(
        "what torch's functions wrap",
        OWNERS,
        "        function = wrapped_by(function)\n    return True",
        "        break\n    return True",
        "hf/changed_in_place:what_every",
    ),
    _never("kinds of registries", BUILT, "type(registry) not in _REGISTRIES", "hf/changed_in_place:what_a_tower"),
    _without(
        "partial functions",
        CHANGE,
        "            and list(map(_parts_of_partial, self.partials[0])) == self.partials[1]\n",
        "hf/changed_in_place:what_a_tower",
    ),
    _without(
        "the class of a fused tower",
        CHANGE,
        "            and self._is_of_its_class()\n",
        "hf/changed_in_place:the_towers",
    ),
    _without(
        "names that hide",
        RECORDED,
        "            and all(map(KEYS.isdisjoint, *self.hidden))\n",
        "hf/changed_in_place:what_a_tower",
    ),
    _without("buffers that come", CHANGE, ", *(m._buffers for m in modules)", "hf/changed_in_place:what_a_tower"),
    Mutant(
        "classes of configs",
        CHANGE,
        "shadows |= {(type(c), name) for c in configs for name in _CONFIG",
        "shadows |= {(type(c), name) for c in () for name in _CONFIG",
        "hf/changed_in_place:what_every",
    ),
    Mutant(
        "what cannot be judged",
        CHECKED,
        "self._reason, *OF_ODD_OBJECTS",
        "self._reason, TypeError",
        "hf/changed_in_place:whatever",
    ),
    # what is asked at a call
    _without("global forward hooks", FALLBACK, '_global.get("_global_forward_hooks") or ', "hf/fallback:hooks_on"),
    _without(
        "global forward pre-hooks", FALLBACK, ' or _global.get("_global_forward_pre_hooks")', "hf/fallback:hooks_on"
    ),
    Mutant("gradients", FALLBACK, "if torch.is_grad_enabled():", "if False:", "hf/state:training"),
    _never(
        "saved tensors",
        FALLBACK,
        "_is_checkpointed() and marks_for_gradients(module)",
        "hf/gradient_checkpointing:a_tower",
    ),
    Mutant(
        "marks elsewhere", IN_HOOKS, "repeat(hooks is embedding)", "repeat(True)", "hf/gradient_checkpointing:other"
    ),
    Mutant(
        "outputs that require gradients",
        "fusedvit/outputs/hugging_face.py",
        "if marks_for_gradients(tower):",
        "if False:",
        "hf/gradient_checkpointing:outputs",
    ),
    _never("autocast to another dtype", FALLBACK, "dtype != parameter.dtype", "hf/autocast:autocast"),
    Mutant("keywords that are read", ARGUMENTS, "read |= names\n", "pass\n", "hf/arguments:keywords"),
    _never("shards between calls", ENCODER, "gathers_shards(self.tower)", "hf/handles:what_a_sharded"),
    _never("copies of a tower", ENCODER, "self._tower() is not tower", "hf/handles:a_copy hf/handles:rep"),
    Mutant(
        "classes of tensors",
        "fusedvit/checks/transforms.py",
        " or cls.__torch_function__ is not _no_function",
        "",
        "hf/transforms:inputs_of_a_class",
    ),
    Mutant(
        "transforms",
        ENCODER,
        "reason = transforms.active(pixels, grid_thw)",
        "reason = None",
        "hf/transforms:transforms",
    ),
    Mutant(
        "weights that changed meanwhile",
        REPLAY,
        "found.unchanged and weights.version == version)",
        "found.unchanged)",
        "unit/speculative_replay:weights",
    ),
    _never("handles of shallow copies", API, "handle is not None and not handle.serves(self)", "hf/handles:a_copy"),
    Mutant(
        "options that cannot be met", PREPARED, "self._limits(options, torch.float32, 0)", "pass", "hf/messages:options"
    ),
    _never("counts in 32 bits", LIMITS, "count > MOST", "hf/messages:options"),
    # prepared weights, and memory that moves
    Mutant(
        "the snapshot dropped with a reason",
        CACHE,
        "self._snapshot = None  # whatever",
        "pass  # whatever",
        "hf/fallback:weights_written",
    ),
    Mutant(
        "one door to prepared weights",
        CACHE,
        "reason = source.reason()\n        if reason",
        "reason = source.reason() and None\n        if reason",
        "hf/numbers:every_way",
    ),
    _without(
        "verdicts on another state", CACHE, " or not last.snapshot.renewed().unchanged()", "hf/changes:a_change_that"
    ),
    _without("verdicts on memory that moved", CACHE, " if last.snapshot.in_place() else None", "hf/memory:freed"),
    _without("verdicts on other content", CACHE, " if last.holds() else None", "hf/fp16_range:it_is"),
    Mutant(
        "verdicts on buffers",
        CHECKED,
        "self._by_state = False\n            wrong",
        "wrong",
        "hf/numbers:every_attribute_that",
    ),
    _never("where foreign code is kept", FOUND, "owner is not None", "hf/own_code:a_method_of hf/own_code:ways"),
    _without(
        "bodies of foreign code",
        WALK,
        "self.found.keep(function)  # its body may be what differs\n            ",
        "hf/own_code:ways",
    ),
    _never("addresses before a replay", REPLAY, "not weights.in_place()", "hf/memory:no_kernel"),
    Mutant(
        "addresses before a fingerprint",
        CACHE,
        "check_content = check_content and in_place",
        "pass",
        "hf/memory:no_kernel",
    ),
    Mutant(
        "addresses after a call",
        CACHE,
        "found if in_place else found._replace(unchanged=False)",
        "found",
        "hf/memory:a_grid_read",
    ),
    _never(
        "graphs of addresses of before",
        CACHE,
        "before and before != current.pointers",
        "hf/memory:graphs_go hf/memory:no_kernel",
    ),
    Mutant("content that was lost", READ, "lost = n is not None and not", "lost = False and not", "hf/memory:sleep"),
    Mutant("buffers after a loss", CACHE, "            self._on_loss()", "            pass", "hf/memory:sleep"),
    Mutant(
        "content",
        READ,
        "            unchanged, n = False, self.parameters",
        "            n = self.parameters",
        "hf/weights:answer",
    ),
    Mutant("positions without a step", PRINT, "begin + (drawn * share >> 31)", "begin", "kernels/fingerprint"),
    Mutant(
        "outputs apart",
        RUNNER,
        "merged = [torch.empty(shape, device=device, dtype=dtype) for _ in range(spec.merged_outputs)]",
        "merged = list(torch.empty(spec.merged_outputs, *shape, device=device, dtype=dtype))",
        "hf/memory:outputs",
    ),
    Mutant(
        "overflow item by item",
        RUNNER,
        "if len(steps) == 1 and steps[0].batch is None:",
        "if all(s.batch is None for s in steps):",
        "unit/speculative_replay:what",
    ),
    _never(
        "hidden states of other pixels",
        LAZY,
        "not all(state.unchanged() for state in self.inputs)",
        "hf/lazy_outputs:reading",
    ),
    _never("hidden states of other weights", LAZY, "what", "hf/lazy_outputs:reading"),
    Mutant(
        "inputs of what was read",
        UNREAD,
        "self._hidden, self._compute = self._compute(), None",
        "self._hidden = self._compute()",
        "hf/unread_in_models:a_tower_keeps",
    ),
    Mutant(
        "who searches records", LAZY, "_reader().startswith(_WALKING)", "False", "hf/unread_states:walking_computes"
    ),
    _without(
        "casts before writes",
        UNREAD,
        "        self._source.will_convert(found)\n",
        "hf/unread_states:what_is_written",
    ),
    Mutant(
        "dtypes under autocast",
        UNREAD,
        "(function in _OF_LAYOUT and this._source.uniform)",
        "function in _OF_LAYOUT",
        "hf/unread_states:under_autocast",
    ),
    _without("other casts", UNREAD, " or self._conversion != other._conversion", "hf/unread_states:tensors_out"),
    _without(
        "places of unread tensors",
        UNREAD,
        " or [t._index for t in found] not in ([None], [*range(len(found))])",
        "hf/unread_states:tensors_out",
    ),
    _without(
        "sizes of unread tensors",
        UNREAD,
        ', dispatch_sizes_strides_policy="sizes"',
        "hf/unread_states:uses_of_a_tensor",
    ),
    # graphs and kernels
    Mutant(
        "memory that is not the value",
        "fusedvit/runtime/inputs.py",
        "return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()",
        "return tensor",
        "unit/speculative_replay:kernels_get",
    ),
    _without("replays of negative grids", REPLAY, " or grid.is_neg()", "unit/speculative_replay:kernels_get"),
    _without("loads of negatives", LOAD, "\n        and not pixels.is_neg()", "unit/speculative_replay:kernels_get"),
    _without("the plan of a replay", REPLAY, " or batch.budget != self.budget", "unit/speculative_replay"),
    Mutant(
        "the lock of a replay",
        MANAGER,
        "        with self._lock:\n            graph = self._graphs.get(budget)",
        "        with contextlib.nullcontext():\n            graph = self._graphs.get(budget)",
        "unit/graphs/manager unit/speculative_replay",
    ),
    Mutant(
        "failures are remembered",
        MANAGER,
        "budget not in self._graphs and budget not in self._failed:",
        "budget not in self._graphs:",
        "unit/graphs/manager",
    ),
    _without("failures without a message", MANAGER, " or type(error).__name__", "unit/graphs/manager"),
    Mutant(
        "a failed budget's work",
        MANAGER,
        "min((b for b in self._graphs if b > budget), default=None)",
        "None",
        "unit/graphs/manager",
    ),
    _without("a forward past the fused one", ENCODER, "bypass(self.tower) or ", "hf/own_forward:put_before"),
    Mutant(
        "parameters that lie in other orders",
        CHECKED,
        "**parameters, **turned}",
        "**parameters}",
        "hf/transposed:every_parameter",
    ),
    Mutant(
        "a table of our own",
        PREPARE,
        'if f"{names.position}.weight" in own else',
        "if False else",
        "hf/transposed:held",
    ),
    Mutant(
        "ingredients of kept weights",
        CACHE,
        " or ingredients[0] != before[0]",
        "",
        "hf/kept_weights:written_meanwhile hf/kept_weights:an_adapter",
    ),
    _without("kinds of weights that are followed", CACHE, " or not {*kinds} <= {*self.kinds}", "hf/byte_patches:a_new"),
    _never("LoRA with gaps in memory", ADAPTERS, "wrong", "hf/adapters:adapters_with"),
    _without(
        "attributes of copies", COPIES, " or content_of(mine[name]) != content_of(value)", "hf/data_parallel:adapters"
    ),
    Mutant(
        "modules of copies",
        COPIES,
        "_structure_of(self._tower) != _structure_of(tower)",
        "False",
        "hf/data_parallel:adapters hf/data_parallel:any",
    ),
    _without(
        "towers that copies may follow", PARALLEL, " and weights.host_unchanged()", "hf/data_parallel:a_change_that"
    ),
    Mutant(
        "shares on copies that are written",
        PARALLEL,
        "wait(tuple(self._under_way))\n            for copied in self._copies:\n                copied.update_from",
        "for copied in self._copies:\n                copied.update_from",
        "hf/tower_copies:no_copy",
    ),
    Mutant(
        "versions that shares ran on",
        PARALLEL,
        "weights.version == begun.version",
        "weights.version == self._synced",
        "hf/tower_copies:a_call_compares",
    ),
    Mutant(
        "shares that end after an error",
        PARALLEL,
        "wait(begun.others)  # also",
        "pass  #",
        "hf/tower_copies:shares",
    ),
    _without("threads of a child", PARALLEL, "        renew_in_children(self)\n", "hf/tower_copies:a_child_has"),
    Mutant(
        "copies that a parent was writing",
        PARALLEL,
        "self._lock, self._synced = threading.RLock(), -1",
        "self._lock = threading.RLock()",
        "hf/tower_copies:a_child_writes",
    ),
    Mutant("syncs are no changes", COPIES, "self._handle.weights.expect_change()", "pass", "hf/tower_copies:syncs"),
    _without(
        "copies built in inference mode",
        COPIES,
        "    @torch.inference_mode(False)  # tensors made in it cannot be written outside\n",
        "hf/tower_copies:a_copy_that",
    ),
    _never("options of a new copy", ENCODER, "copied.config != self.config", "hf/tower_copies:options_replaced"),
    Mutant(
        "memory of copies",
        ENCODER,
        "in self._each_prepared():\n            prepared.release()",
        "in (self.prepared,):\n            prepared.release()",
        "hf/tower_copies:memory",
    ),
    Mutant(
        "versions of kept weights",
        CACHE,
        "written = None in ingredients[1] or ingredients[1] != before[1]",
        "written = False",
        "hf/kept_weights:written_meanwhile hf/kept_weights:parameters_that",
    ),
    Mutant(
        "all content of kept weights",
        CACHE,
        "(lent, whole) if digest == self._digest else None",
        "(lent, whole)",
        "hf/kept_weights:one_element",
    ),
    Mutant(
        "all content of written parameters",
        CACHE,
        " or (written and moved.digest() != self._digest)",
        "",
        "hf/kept_weights:one_element",
    ),
    Mutant(
        "all else of written parameters",
        CACHE,
        " or not now.unchanged() or (written",
        " or (written",
        "hf/kept_weights:whatever_else",
    ),
    Mutant("digests of all elements", DIGEST, ".split(CHUNK):", ".split(CHUNK)[:1]:", "unit/digest:every"),
    _without(
        "equal values in others' place",
        RECORDED,
        " or self._replaced_by_equals()",
        "hf/kept_weights:the_same_adapters hf/numbers:equal",
    ),
    _without("what equals hold", RECORDED, "        self._containers = self._containers_of(now)\n", "hf/numbers:equal"),
    Mutant(
        "what replaced containers held", RECORDED, "held.get(i, before[i])", "before[i]", "unit/recorded:attributes"
    ),
    Mutant("types of equals", RECORDED, "(kind, repr(value)) if kind", "value if kind", "unit/recorded:attributes"),
    Mutant("rounding of adapters", ADAPTERS, ".mul_(_GOLDEN).frac_()", ".mul_(0).add_(0.5)", "hf/adapters:small"),
    Mutant("adapters beyond fp16", ADAPTERS, "size <= info.max, evenly", "size >= 0, evenly", "hf/adapters:rounded"),
    Mutant(
        "parameters of active adapters",
        ADAPTERS,
        "filter(active.__contains__, child)",
        "()",
        "hf/adapters:changes",
    ),
    Mutant(
        "gradients of idle adapters",
        CHANGE,
        " or any(map(_wants_gradient, self.idle))",
        "",
        "hf/kept_weights:an_idle_adapter",
    ),
    Mutant(
        "buffers that are read",
        CHECKED,
        "self._own_code().names.union(self.family.engine.buffers, given)",
        "frozenset()",
        "hf/kept_weights:whatever_else",
    ),
    Mutant(
        "content of kept weights",
        CACHE,
        "if current.content.agrees_with(whole) else None",
        "if True else None",
        "hf/kept_weights:written_meanwhile",
    ),
    Mutant(
        "weights that were half prepared",
        CACHE,
        "self._snapshot = self._ingredients = None  # where",
        "# where",
        "hf/kept_weights:a_preparation",
    ),
    Mutant(
        "weights that training writes", ENCODER, "watch_data or self._trained", "watch_data", "hf/kept_weights:steps_of"
    ),
    Mutant("calls that prepare", ATTEMPTS, "elif each:", "elif False:", "hf/pauses:other"),
    Mutant(
        "parameters of FSDP1",
        BUILT,
        "if isinstance(tensor, nn.Parameter) else tensor._base",
        "",
        "hf/handles:a_tower_that_fsdp1",
    ),
    Mutant("calls pause after a change", ATTEMPTS, "self.pause.begin(found)", "pass", "hf/pauses:weights_written"),
    Mutant(
        "equal content is no news",
        CACHE,
        "torch.equal(before.expected[:count], now.expected)",
        "True",
        "hf/pauses:other",
    ),
    _never(
        "a pause ends",
        ATTEMPTS,
        "not isinstance(found, Reason) and not prepared",
        "hf/pauses:weights_written",
    ),
    Mutant(
        "what idle adapters hold",
        CODE,
        "adapters.modules_run(layer)",
        "layer.modules()",
        "hf/adapters:adapters_of_other",
    ),
    Mutant(
        "what a layer runs",
        ADAPTERS,
        "for name in _RUN:",
        "for name in ():",
        "hf/adapters:a_class_that",
    ),
    _without("offloading by its name", CHECKED, ", which accelerate offloads", "hf/changes"),
    _without("modes that see operations", ENCODER, " or transforms.active(None)", "hf/messages:questions"),
    _never("products beyond fp16", RANGE, "cost > 1", "hf/fp16_range:what_fp16"),
    Mutant("bits below normal numbers", RANGE, "(_EPS * size)", "(_TINY + _EPS * size)", "hf/fp16_range:the_criterion"),
    Mutant("biases that come of products", RANGE, ".nan_to_num(0.0, 0.0, 0.0)", "", "hf/fp16_range:the_scale"),
    _without(
        "norms that fp16 cannot hold",
        PREPARE,
        '        self.products.add(f"{norm}.weight times the weights behind it", exact, scaled, bias)\n',
        "hf/fp16_range:what_fp16",
    ),
    _without(
        "bytes that fp16 cannot hold",
        PREPARE,
        '        self.products.add(f"{name}.weight times the scale of bytes", exact, rounded, common)\n',
        "hf/fp16_range:the_scale",
    ),
    Mutant(
        "adapters that fp16 cannot hold",
        CHECKED,
        "folded(plain, products)",
        "folded(plain, Products())",
        "hf/fp16_range:what_fp16",
    ),
    Mutant(
        "a refusal before a call",
        ENCODER,
        "source.reason_of_fp16() if found is None and",
        "None if found is None and",
        "hf/fp16_range:what_fp16",
    ),
    Mutant(
        "handles that are copied first",
        ENCODER,
        'if "_tower" not in self.__dict__:',
        "if False:",
        "hf/handles:a_handle_that",
    ),
    Mutant("copies of a handle that ended", ENCODER, "self.prepared.ended = ended", "pass", "hf/handles:a_handle_that"),
    _without("locks of a child", ENCODER, "        renew_in_children(self)\n", "hf/forks:a_child_waits"),
    Mutant(
        "half-prepared weights of a child",
        PREPARED,
        "self._lock = threading.RLock()\n            self.weights.outdate()\n",
        "self._lock = threading.RLock()\n",
        "hf/forks:weights_half",
    ),
    Mutant("what a forward holds", OWN, "if held is fused:", "if True:", "hf/own_forward:put_before"),
    Mutant(
        "a use ends whatever is raised",
        MANAGER,
        "            finally:\n                self._capture.after_use()\n            return True",
        "            finally:\n                pass\n            self._capture.after_use()\n            return True",
        "unit/graphs/manager",
    ),
    Mutant(
        "overflow of frames x rows",
        LOAD,
        "tokens = tl.where(good & (frame <= rows), t, 0) * frame",
        "tokens = tl.where(good, t, 0) * frame",
        "kernels/load_inputs",
    ),
    _without(
        "the frame budget", LOAD, " | (frames > most_frames)", "kernels/load_inputs unit/speculative_replay:a_video"
    ),
    Mutant(
        "moments of merged rows",
        EPILOGUE,
        "PER_LENGTH: tl.constexpr = (LENGTH + WIDTH - 1) // WIDTH\n    offs = tl.arange(0, CHUNK)\n    count",
        "PER_LENGTH: tl.constexpr = PARTS\n    offs = tl.arange(0, CHUNK)\n    count",
        "kernels/linear kernels/epilogue",
    ),
    Mutant(
        "row statistics of RMS norms",
        REFERENCE,
        "return torch.rsqrt((part_m2 + size * part_mean**2)",
        "return torch.rsqrt((part_m2 + part_mean**2)",
        "kernels/epilogue kernels/linear unit/family_encoders",
    ),
    Mutant(
        "64-bit rows of a norm",
        NORMS,
        "rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)\n        mask_m = rows < num_rows\n        mask =",
        "rows = block * BLOCK_M + tl.arange(0, BLOCK_M)\n        mask_m = rows < num_rows\n        mask =",
        "kernels/norms kernels/aot:command_passes",
    ),
    # what is written, and where
    _without(
        "whose inputs a shard holds",
        SHARDS,
        '        wrong = wrong or next(others, "")\n',
        "unit/shards:a_shard_of_something",
    ),
    Mutant("who may enter a shard", SHARDS, "    folder.mkdir()\n", "    folder.mkdir(0o700)\n", "unit/shards:who"),
    Mutant("who may read rows", SHARDS, "shutil.copymode(folder / INDEX, folder / ROWS)", "pass", "unit/shards:who"),
    Mutant("modes that nobody changes", SHARDS, "suppress(PermissionError)", "suppress()", "unit/shards:a_file_system"),
    _without("whose job is taken back", SHARDS, "is_ours and ", "unit/shards:a_job_that_is"),
    Mutant(
        "interrupted starts",
        JOB,
        "    except BaseException:\n        shards.abandon",
        "    except InputError:\n        shards.abandon",
        "hf/corpus:a_job_that_ends",
    ),
    Mutant("shards of other runs", ON_RAY, 'if row.pop("committed"):', "if True:", "hf/corpus:what_another_run"),
    Mutant("names of failed inputs", EMBED, "rest if is_path else error", "error", "hf/corpus:an_input_is_named"),
    Mutant("paths before an error", EMBED, "before.endswith(os.sep)", "before", "hf/corpus:an_input_is_named"),
    _never(
        "documents that are not replaced",
        CONSOLE,
        "error.errno not in _NOT_REPLACED or not path.is_file()",
        "unit/cli_usage:a_full_disk",
    ),
    Mutant(
        "mounted documents",
        CONSOLE,
        "(errno.EBUSY, errno.EXDEV,",
        "(errno.EXDEV,",
        "unit/cli_usage:a_document_that_may",
    ),
    Mutant(
        "mounted tables", TABLE, "if error.errno != errno.EBUSY:", "if True:", "kernels/tuning_table:a_table_that_is"
    ),
    Mutant(
        "tables and other errors",
        TABLE,
        "if error.errno != errno.EBUSY:",
        "if False:",
        "kernels/tuning_table:a_table_that",
    ),
    _without("text that is interrupted", ENDING, '    exec("")', "unit/cli_ending:a_signal_that_interrupts"),
    _without("devices of processors", PROCESSORS, " or known", "hf/fuse_processor:fuse_keeps"),
    _without("machines that fail", COMPILED, "_of_machine(error, folder) or ", "unit/compiled_kernels:a_machine"),
    Mutant("videos of phones", MEDIA, "round(frame.rotation / 90)", "0", "unit/pixels/media:videos_are_turned"),
    Mutant("pictures of another's plugin", FORMATS, '{"MPO": "JPEG"}', "{}", "unit/pixels/media:whatever"),
    _never("settings of Triton", SERVICE, "known not in ({}, settings)", "unit/compile_service:settings_that_change"),
    _never(
        "keys' ptxas",
        WORKER,
        "attempted(lambda: get_ptxas_version(request.arch)) != request.ptxas",
        "unit/compile_service:settings",
    ),
    _never("other keys", WORKER, 'mode.digest not in ("", digest)', "unit/compile_service:a_kernel_that_has_another"),
    Mutant(
        "a folder's ptxas",
        COMPILED,
        'found["ptxas"] != _ptxas(target)',
        "False",
        "unit/compiled_kernels:what_does_not_fit",
    ),
    _without("sums that overflow", LAUNCH, ', "sanitize_overflow": False', "kernels/aot:fingerprints_may_overflow"),
)
