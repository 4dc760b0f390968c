"""The examples in the documentation of the Executor. The listings are unmodified; the folders that they use are those
of a fixture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from midstream import executor as api
from midstream.executor import CompletionOutput, Executor, GenerationExecutor, GenerationRequest, GenerationResult
from tests.scheduler.harness import Harness
from tests.seeds.listings import run, tensorrt_llm

SETTINGS = {"MIDSTREAM_MAX_KV_TOKENS": "4096", "MIDSTREAM_MAX_BATCH_SIZE": "16"}

CREATE = """
from tensorrt_llm.executor import GenerationExecutor
from tensorrt_llm import SamplingParams
# 1. 初始化Executor(通常由LLM类内部创建)
executor = GenerationExecutor.create(
    engine_dir="./llama-3-8b-engine",
    tokenizer_dir="./llama-3-8b",
)
# 2. 准备输入
prompt_token_ids = [1, 15043, 29892, 920, 526, 366] # "Hello, how are you"
# 3. 配置采样
sampling_params = SamplingParams(
    max_tokens=100,
    temperature=0.8,
    top_p=0.95,
)
# 4. 异步生成
result = executor.generate_async(
    prompt_token_ids=prompt_token_ids,
    sampling_params=sampling_params,
)
# 5. 获取结果
output = result.result() # 阻塞等待
print("Generated:", output.text)
"""

STREAMING = """
# 流式生成配置
result = executor.generate_async(
    prompt_token_ids=prompt_token_ids,
    sampling_params=sampling_params,
    streaming=True, # 启用流式
)
# 流式迭代
print("Streaming: ", end='')
for output in result:
    # 每生成一个token返回一次
    print(output.text_diff, end='', flush=True)
print()
"""

BATCH = """
# 批量请求
prompt_token_ids_list = [
    [1, 15043, 29892], # "Hello,"
    [1, 3532, 825], # "What is"
    [1, 1724, 437], # "How to"
]
sampling_params_list = [
    SamplingParams(max_tokens=50, temperature=0.7),
    SamplingParams(max_tokens=100, temperature=0.9),
    SamplingParams(max_tokens=80, temperature=0.8),
]
# 同步批量生成
results = executor.generate(
    prompt_token_ids=prompt_token_ids_list,
    sampling_params=sampling_params_list,
)
for i, result in enumerate(results):
    print(f"Result {i}: {result.result().text}")
"""

LORA = """
from tensorrt_llm.executor import LoRARequest
# LoRA请求
lora_request = LoRARequest(
    lora_name="math_lora",
    lora_int_id=1,
    lora_path="./lora_weights/math",
)
# 使用LoRA生成
result = executor.generate_async(
    prompt_token_ids=prompt_token_ids,
    sampling_params=sampling_params,
    lora_request=lora_request,
)
output = result.result()
"""

RESULTS = """
# 同步获取(阻塞)
result = executor.generate_async(prompt_token_ids, sampling_params)
output = result.result() # 阻塞直到完成
# 异步获取(需要在async函数中)
async def generate():
    result = executor.generate_async(prompt_token_ids, sampling_params)
    output = await result.aresult() # 异步等待
    return output
# 流式获取
result = executor.generate_async(prompt_token_ids, sampling_params, streaming=True)
for output in result: # 迭代器,每生成一个token返回一次
    print(output.text, end='', flush=True)
"""

ITERATION = """
# 流式生成
result = executor.generate_async(
    prompt_token_ids=[1, 15043, 29892],
    sampling_params=SamplingParams(max_tokens=100),
    streaming=True
)
# 方法1:for循环迭代
for output in result:
    new_text = output.text[len(prev_text):] # 增量文本
    print(new_text, end='', flush=True)
    prev_text = output.text
# 方法2:异步迭代
async for output in result:
    print(output.text_diff, end='', flush=True)
"""

BATCHING = """
# 配置更大的批次和Token数
executor_config = tllm.ExecutorConfig(
    max_batch_size=256, # 更大批次
    max_num_tokens=8192, # Token数限制
    scheduler_config=tllm.SchedulerConfig(
        policy=tllm.SchedulerPolicy.MAX_UTILIZATION,
    ),
)
"""

POST_PROCESSING = """
# 启用多个后处理Worker
executor = GenerationExecutor.create(
    engine_dir="./engine",
    num_postprocess_workers=4, # 4个后处理进程
    postprocess_tokenizer_dir="./tokenizer",
)
# 优势:解tokenize异步并行,降低主线程延迟
"""

RETENTION = """
from tensorrt_llm.executor import KvCacheRetentionConfig
# 配置KV Cache保留
kv_config = KvCacheRetentionConfig(
    max_tokens=1024, # 保留前1024个tokens的KV Cache
)
# 用于prefix相同的多轮对话
result = executor.generate_async(
    prompt_token_ids=prompt_token_ids,
    sampling_params=sampling_params,
    kv_cache_retention_config=kv_config,
)
"""

TIMEOUT = """
try:
    output = result.result(timeout=30.0) # 30秒超时
except TimeoutError:
    executor.abort_request(result.request.id)
"""

STATISTICS = """
# 通过stats队列获取统计信息
stats = executor.get_latest_stats()
print(f"Active requests: {stats.num_active_requests}")
print(f"Queued requests: {stats.num_queued_requests}")
print(f"Batch size: {stats.current_batch_size}")
"""

SUBMIT = """
def submit(self, request: GenerationRequest) -> GenerationResult:
    # 1. 分配唯一请求ID
    request.set_id(self._get_next_client_id())
    self._last_client_id = request.id
    # 2. 提取logprob参数(用于后续解tokenize)
    logprob_params = self._get_logprob_params(request)
    # 3. 创建GenerationResult(Future对象)
    result = GenerationResult(
        request,
        background_error_handler=self._handle_background_error,
        executor=self,
        disaggregated_params=request.disaggregated_params,
        logprob_params=logprob_params,
    )
    # 4. 保存到_results映射(用于后续查找)
    self._results[request.id] = result
    # 5. 入队请求
    self._enqueue_request(request, result.queue)
    return result
"""

ENQUEUE = """
def _enqueue_request(self, request: GenerationRequest, result_wait_queue=None) -> int:
    # 1. 创建C++ Executor请求对象
    executor_request = tllm.Request(
        input_token_ids=request.prompt_token_ids,
        max_tokens=request.sampling_params.max_tokens,
        streaming=request.streaming,
        sampling_config=tllm.SamplingConfig(
            beam_width=request.sampling_params.beam_width if request.sampling_params.use_beam_search else 1,
            temperature=request.sampling_params.temperature,
            top_k=request.sampling_params.top_k,
            top_p=request.sampling_params.top_p,
            # ... 其他采样参数
        ),
        output_config=tllm.OutputConfig(
            return_log_probs=request.sampling_params.logprobs is not None,
            return_context_logits=request.sampling_params.return_context_logits,
            return_generation_logits=request.sampling_params.return_generation_logits,
        ),
        # 高级特性
        lora_config=self._create_lora_config(request.lora_request),
        prompt_tuning_config=self._create_prompt_adapter_config(request.prompt_adapter_request),
        kv_cache_retention_config=request.kv_cache_retention_config,
    )
    # 2. 设置logits后处理器(用于自定义采样逻辑)
    if request.sampling_params.logits_processor:
        executor_request.logits_post_processor = request.sampling_params.logits_processor
    # 3. 提交到C++ Executor
    request_id = self.executor.enqueue_request(executor_request)
    # 4. 映射request_id到client_id
    self.req_id_to_client_id[request_id] = request.id
    return request_id
"""

GENERATE_ASYNC = """
def generate_async(self, prompt_token_ids, sampling_params, streaming=False, **kwargs):
    # 1. 校验输入
    assert isinstance(prompt_token_ids[0], int)
    assert isinstance(sampling_params, SamplingParams)
    # 2. 初始化迭代结果队列(首次调用)
    self._maybe_initialize_iteration_results()
    # 3. 创建GenerationRequest
    request = GenerationRequest(
        prompt_token_ids,
        sampling_params=sampling_params,
        streaming=streaming,
        query_token_ids=kwargs.get('query_token_ids'),
        lora_request=kwargs.get('lora_request'),
        prompt_adapter_request=kwargs.get('prompt_adapter_request'),
        # ... 其他参数
    )
    # 4. 提交请求
    result = self.submit(request)
    return result
"""

RESPONSES = '''
def _handle_responses(self):
    """
    后台线程:持续从C++ Executor获取响应并分发
    """
    while not self._shutdown:
        try:
            # 1. 从C++ Executor获取响应(阻塞,带超时)
            responses = self.executor.await_responses(timeout=datetime.timedelta(milliseconds=100))
            # 2. 批量处理响应
            for response in responses:
                # 2.1 查找对应的client_id
                client_id = self.req_id_to_client_id.get(response.request_id)
                if client_id is None:
                    continue
                # 2.2 获取GenerationResult
                result = self._results.get(client_id)
                if result is None:
                    continue
                # 2.3 解析响应
                output_token_ids = response.result.output_token_ids[0] # beam_idx=0
                is_final = response.result.is_final
                # 2.4 创建CompletionOutput
                completion_output = CompletionOutput(
                    index=0,
                    text="", # 后续由PostprocWorker解tokenize
                    token_ids=output_token_ids,
                    cumulative_logprob=response.result.cum_log_probs,
                    logprobs=self._get_logprobs(response),
                    finish_reason=response.result.finish_reason if is_final else None,
                )
                # 2.5 发送到后处理队列
                if self.postproc_config.num_postprocess_workers > 0:
                    # 异步后处理
                    postproc_input = PostprocWorker.Input(
                        response=response,
                        sampling_params=result.sampling_params,
                        streaming=result.streaming,
                    )
                    pid = client_id % self.postproc_config.num_postprocess_workers
                    self.postproc_queues[pid].put(postproc_input)
                else:
                    # 同步后处理
                    text = self.tokenizer.decode(output_token_ids)
                    completion_output.text = text
                    result.queue.put(completion_output)
                # 2.6 标记完成
                if is_final:
                    self._pop_result(client_id)
        except Exception as e:
            self._error_queue.put(e)
            break
'''

RESULT_CLASS = '''
class GenerationResult:
    """
    生成结果Future对象
    """
    def __init__(self, request, queue, streaming):
        self.request = request
        self.queue = queue # 接收CompletionOutput的队列
        self.streaming = streaming
        self._done = False
        self._final_output = None
    def __iter__(self):
        """
        流式迭代器(支持for循环)
        """
        assert self.streaming, "Not a streaming result"
        while True:
            # 从队列获取输出(阻塞)
            output = self.queue.get()
            # 检查是否完成
            if output.finish_reason is not None:
                self._done = True
                self._final_output = output
                yield output
                break
            yield output
    def result(self, timeout=None):
        """
        同步获取最终结果(非流式)
        """
        if self._done:
            return self._final_output
        # 阻塞等待
        while True:
            output = self.queue.get(timeout=timeout)
            if output.finish_reason is not None:
                self._done = True
                self._final_output = output
                return output
    async def aresult(self, timeout=None):
        """
        异步获取最终结果
        """
        if self._done:
            return self._final_output
        # 异步等待
        while True:
            output = await self.queue.get_async(timeout=timeout)
            if output.finish_reason is not None:
                self._done = True
                self._final_output = output
                return output
'''

BATCH_SCHEDULER = '''
class BatchScheduler:
    """
    动态批处理调度器(C++实现,此处为伪代码)
    """
    def __init__(self, max_batch_size, max_num_tokens):
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.active_requests = []
        self.pending_requests = Queue()
    def schedule_step(self):
        """
        单步调度:决定哪些请求参与本次推理
        """
        # 1. 移除已完成的请求
        self.active_requests = [
            req for req in self.active_requests
            if not req.is_finished()
        ]
        # 2. 尝试添加新请求
        while not self.pending_requests.empty():
            new_req = self.pending_requests.peek()
            # 2.1 检查批次大小限制
            if len(self.active_requests) >= self.max_batch_size:
                break
            # 2.2 检查Token数量限制(关键!)
            current_tokens = sum(req.num_tokens for req in self.active_requests)
            new_tokens = new_req.num_tokens
            if current_tokens + new_tokens > self.max_num_tokens:
                break
            # 2.3 加入批次
            self.active_requests.append(self.pending_requests.get())
        # 3. 返回当前批次
        return self.active_requests
'''


@pytest.fixture(scope="module")
def first(folders: Path) -> Iterator[dict[str, Any]]:
    """Run the first example, and return the names that it defines; the other examples use its executor."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.chdir(folders)
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        stack.enter_context(tensorrt_llm())
        names = run(CREATE)
        yield names
        names["executor"].shutdown()


def go_on(first: dict[str, Any], listing: str, **names: Any) -> dict[str, Any]:
    return run(listing, **{**first, **names})


def test_basic_generation(first: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    result, output = first["result"], first["output"]
    assert output.text
    assert output.finish_reason in ("stop", "length")
    assert result.done
    assert not result.streaming
    assert result.request.prompt_token_ids == first["prompt_token_ids"]


@pytest.mark.usefixtures("in_folders")
def test_streaming(first: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    names = go_on(first, STREAMING)
    assert capsys.readouterr().out == f"Streaming: {names['output'].text}\n"
    assert names["result"].streaming


@pytest.mark.usefixtures("in_folders")
def test_batch(first: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    names = go_on(first, BATCH)
    texts = [result.outputs[0].text for result in names["results"]]
    assert capsys.readouterr().out == "".join(f"Result {i}: {text}\n" for i, text in enumerate(texts))
    assert all(texts)


@pytest.mark.usefixtures("in_folders")
def test_lora(first: dict[str, Any]) -> None:
    plain = first["executor"].generate(first["prompt_token_ids"], api.SamplingParams(max_tokens=8, temperature=0))
    names = go_on(first, LORA, sampling_params=api.SamplingParams(max_tokens=8, temperature=0))
    assert names["output"].token_ids != plain.outputs[0].token_ids


@pytest.mark.usefixtures("in_folders")
def test_results(first: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    names = go_on(first, RESULTS + "\nawaited = await generate()")
    assert names["awaited"].text
    assert capsys.readouterr().out.endswith(names["output"].text)


@pytest.mark.usefixtures("in_folders")
def test_iteration(first: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The listing combines two alternatives, so no output is left for the second one; it needs an initial
    `prev_text`.
    """
    names = go_on(first, ITERATION, prev_text="")
    assert capsys.readouterr().out == names["output"].text == names["prev_text"]


def test_batching() -> None:
    environment = run(BATCHING)["executor_config"].environment()
    assert environment["MIDSTREAM_MAX_BATCH_SIZE"] == "256"
    assert environment["MIDSTREAM_MAX_NUM_TOKENS"] == "8192"
    assert environment["MIDSTREAM_CAPACITY_POLICY"] == "max_utilization"


@pytest.mark.usefixtures("in_folders")
def test_post_processing_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    executor = run(POST_PROCESSING, GenerationExecutor=GenerationExecutor)["executor"]
    with executor:
        assert executor.generate([1, 2, 3], api.SamplingParams(max_tokens=4, ignore_eos=True)).outputs[0].text


@pytest.mark.usefixtures("in_folders")
def test_retention_timeout_and_statistics(first: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    names = go_on(first, RETENTION)
    names = run(TIMEOUT, **names)
    assert names["output"].text
    run(STATISTICS, **names)
    assert capsys.readouterr().out.splitlines()[:2] == ["Active requests: 0", "Queued requests: 0"]


class SeedWorker:
    """The parts of the documentation's BaseWorker that its listings omit. It uses our executor as its engine."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.req_id_to_client_id: dict[int, int] = {}
        self._results: dict[int, Any] = {}
        self._shutdown = False
        self._next_client_id = 0
        self._error_queue: Queue[Exception] = Queue()
        self.postproc_config = SimpleNamespace(num_postprocess_workers=0)
        self.tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))

    def _get_next_client_id(self) -> int:
        self._next_client_id += 1
        return self._next_client_id

    def _get_logprob_params(self, request: GenerationRequest) -> None: ...
    def _handle_background_error(self) -> None: ...
    def _maybe_initialize_iteration_results(self) -> None: ...
    def _get_logprobs(self, response: object) -> list[Any]:
        return []

    def _create_lora_config(self, lora: Any) -> Any:
        return lora

    def _create_prompt_adapter_config(self, adapter: Any) -> Any:
        return adapter

    def _pop_result(self, client_id: int) -> None:
        self._shutdown = True


@pytest.mark.usefixtures("in_folders")
def test_the_workers_listing_runs_on_our_executor(first: dict[str, Any]) -> None:
    """The test runs submit, _enqueue_request, generate_async and _handle_responses of the documentation's BaseWorker.

    SeedWorker supplies the omitted parts. The listed `submit` passes arguments that the listed result class does not
    accept, so the result is created here with the arguments of the class and a plain queue.
    """

    def make_result(request: GenerationRequest, **_: Any) -> Any:
        return names["GenerationResult"](request, Queue(), request.streaming)

    import datetime

    request_class = type("Request", (GenerationRequest,), {"disaggregated_params": None})
    names = run(RESULT_CLASS, SamplingParams=api.SamplingParams, CompletionOutput=CompletionOutput, datetime=datetime)
    shared = {**names, "GenerationRequest": request_class}
    methods = run(GENERATE_ASYNC + ENQUEUE + RESPONSES, **shared)
    methods |= {"submit": run(SUBMIT, **{**shared, "GenerationResult": make_result})["submit"]}
    listed = {name: methods[name] for name in ("submit", "_enqueue_request", "generate_async", "_handle_responses")}
    service = first["executor"]._service
    worker: Any = type("BaseWorker", (SeedWorker,), listed)(Executor.connect(service.addresses))
    greedy = api.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    expected = first["executor"].generate([1, 15043, 29892], greedy).outputs[0].token_ids
    result = worker.generate_async([1, 15043], api.SamplingParams(max_tokens=6, temperature=0), query_token_ids=[29892])
    thread = threading.Thread(target=worker._handle_responses)
    thread.start()
    output = result.result(timeout=60)
    thread.join(60)
    worker.executor.shutdown()
    assert worker._error_queue.empty()
    assert output.finish_reason is api.FinishReason.LENGTH
    # The listing passes only prompt_token_ids, and its output begins with them.
    alone = first["executor"].generate([1, 15043], greedy)
    assert output.token_ids == [1, 15043, *alone.outputs[0].token_ids]
    whole = first["executor"].generate([1, 15043], greedy, query_token_ids=[29892])
    assert whole.outputs[0].token_ids == expected


@pytest.mark.usefixtures("in_folders")
def test_the_documented_listing_reads_our_queue(first: dict[str, Any]) -> None:
    listed = run(RESULT_CLASS)["GenerationResult"]
    executor: GenerationExecutor = first["executor"]
    params = api.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = executor.generate([1, 2, 3], params).outputs[0].token_ids

    def start() -> GenerationResult:
        return executor.generate_async([1, 2, 3], params, streaming=True)

    outputs = list(listed(None, start().queue, True))
    assert [token for output in outputs for token in output.token_ids_diff] == expected
    assert listed(None, start().queue, True).result(timeout=60).token_ids == expected
    awaited = run("output = await listed.aresult(timeout=60)", listed=listed(None, start().queue, True))
    assert awaited["output"].token_ids == expected


def test_the_batch_schedulers_listing_fills_the_same_batches() -> None:
    """The listing is pseudocode: its queue must have `peek`, and each of its requests runs for one step."""

    class PeekQueue(Queue[Any]):
        def peek(self) -> Any:
            return self.queue[0]

    scheduler = run(BATCH_SCHEDULER, Queue=PeekQueue)["BatchScheduler"](max_batch_size=2, max_num_tokens=100)
    finished: set[str] = set()
    for name in "abcde":
        request = SimpleNamespace(name=name, num_tokens=4, is_finished=lambda name=name: name in finished)
        scheduler.pending_requests.put(request)
    batches = []
    while batch := [request.name for request in scheduler.schedule_step()]:
        batches.append(batch)
        finished |= set(batch)
    harness = Harness()
    harness.add_group(max_batch_size=2)
    for name in "abcde":
        harness.submit(name, 4, 1)
    harness.run()
    ours = [[part[1] for part in plan.split() if part.startswith("+")] for plan in harness.plans]
    assert ours == batches == [["a", "b"], ["c", "d"], ["e"]]
