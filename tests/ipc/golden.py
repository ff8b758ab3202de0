"""Owns one example message per kind with its exact bytes. Old bytes must decode for ever: lines are only added.

Used by test_golden.py. The hex is of the frames, joined by "/".
"""

from ipc import messages as m
from ipc.messages import Kind

HEAD = m.Head(request="r", traceparent="t")
USAGE = m.Usage(3, 4, 2)
REPLICA = m.ReplicaReport(slot=1, route="sim", state="ready", epoch=2, pid=7)
COUNTERS = m.Counters(num_sessions=1, finished=2)
REPORT = m.StatusReport("0.1.0", "ready", 7, 1.5, "ab", [m.RouteReport("sim", True, "ready")], [REPLICA], COUNTERS)

MESSAGES = {
    Kind.HELLO: (m.Head(), m.Hello(client="me")),
    Kind.GENERATE: (m.GenerateHead("1", "sim"), m.Generate("hi", max_tokens=4)),
    Kind.CANCEL: (m.Head(request="1"), m.Empty()),
    Kind.MODELS: (m.Head(), m.Empty()),
    Kind.STATUS: (m.Head(), m.Empty()),
    Kind.PING: (HEAD, m.Empty()),
    Kind.BYE: (m.Head(), m.Empty()),
    Kind.TOKENIZE: (m.RouteHead("?1", "sim"), m.Tokenize("hi", add_special=False)),
    Kind.METRICS: (m.Head(), m.Empty()),
    Kind.COUNT: (m.Head(), m.Counts({"/v1/models 200": 3})),
    Kind.WELCOME: (m.Head(), m.Welcome(1, 0, 5, 1.0, 5, 1_048_576, 8192)),
    Kind.EVENTS: (m.EventsHead([3, 4]), None),
    Kind.MODEL_LIST: (m.Head(), m.ModelList([m.Model("sim", True, 2048, "sim-1")])),
    Kind.STATUS_REPORT: (m.Head(), REPORT),
    Kind.PONG: (m.Head(), m.Empty()),
    Kind.ERROR: (m.Head(request="1"), m.Error("invalid", "no", "prompt", "1", 0.5)),
    Kind.TOKENIZED: (m.Head(request="?1"), m.Tokenized([104, 105], "hi", 2048)),
    Kind.METRICS_TEXT: (m.Head(), None),
    Kind.WORKER_HELLO: (m.WorkerHello("token", 0, 3, 99), None),
    Kind.WORKER_READY: (m.WorkerReady(3, 64, 8192, 16, 2048, "sim-1", True), None),
    Kind.EMISSIONS: (
        m.Emissions(3, 9, 5, [11, 12], [1, 1], [0, 7], [1, 2], [65, 66, 67], [30, 0], [m.Ending(1, 0, 4)]),
        None,
    ),
    Kind.REPORT: (m.Report(3, 9, 0.25, 100, 2, 1, 8000, 50, 0, 32, True), None),
    Kind.ANSWER: (m.Answer(3, 5, "?1", True), None),
    Kind.ASSIGN: (m.Assign(11, 1, 5, "1", 42, "tenant", "t"), None),
    Kind.WITHDRAW: (m.Withdraw(11, 1), None),
    Kind.ASK: (m.Ask(5, "?1"), None),
    Kind.DRAIN: (m.Head(), m.Drain(2)),
    Kind.RELOAD: (m.Head(), m.Empty()),
    Kind.STOP: (m.Head(), m.Stop(True)),
    Kind.ADMIN_REPLY: (m.Head(), m.AdminReply(True, "done", ["front.scan_max"])),
}

EVENTS = {
    "delta": m.Delta("1", 2, "ab", [97, 98]),
    "echo": m.Echo("1", 0, "hi", [104, 105], [m.TokenLogprob(104, b"h", None), m.TokenLogprob(105, b"i", -0.5)]),
    "ended": m.Ended("1", 4, "c", [99], 1, "stop", "x", [m.TokenLogprob(9, b"c", -1.0, [m.TopLogprob(9, b"c", -1.0)])]),
    "finished": m.Finished("1", 4, "c", [99], "stop", USAGE, 42, "\n"),
    "failed": m.Failed("1", "overloaded", "full", "", 0.5),
    "cancelled": m.Cancelled("1", 3),
    "expired": m.Expired("1", 3, True),
}

FRAMES = {
    Kind.HELLO: ("454e010100/80/81a6636c69656e74a26d65"),
    Kind.GENERATE: (
        "454e010200/82a772657175657374a131a5726f757465a373696d/de0002a670726f6d7074a26869aa6d61785f746f6b656e7304"
    ),
    Kind.CANCEL: ("454e010300/81a772657175657374a131/80"),
    Kind.MODELS: ("454e010400/80/80"),
    Kind.STATUS: ("454e010500/80/80"),
    Kind.PING: ("454e010600/82a772657175657374a172ab7472616365706172656e74a174/80"),
    Kind.BYE: ("454e010700/80/80"),
    Kind.WELCOME: (
        "454e011100/80/87a56d616a6f7201a56d696e6f7200a773657373696f6e05ab6865617274626561745f73cb3ff00000"
        "00000000b06865617274626561745f6d697373657305ae626f64795f62797465735f6d6178ce00100000b47365737369"
        "6f6e5f72657175657374735f6d6178cd2000"
    ),
    Kind.EVENTS: ("454e011200/81a76c656e67746873920304"),
    Kind.MODEL_LIST: (
        "454e011300/80/81a66d6f64656c739184a5726f757465a373696da869735f7265616479c3ad6d61785f6d6f64656c5f"
        "6c656ecd0800a776657273696f6ea573696d2d31"
    ),
    Kind.STATUS_REPORT: (
        "454e011400/80/88a776657273696f6ea5302e312e30a57374617465a57265616479a370696407a8757074696d655f73"
        "cb3ff8000000000000ab636f6e6669675f68617368a26162a6726f757465739183a5726f757465a373696da869735f72"
        "65616479c3a57374617465a57265616479a87265706c6963617391de0005a4736c6f7401a5726f757465a373696da573"
        "74617465a57265616479a565706f636802a370696407a8636f756e74657273de0011ac6e756d5f73657373696f6e7301"
        "a86e756d5f6f70656e00aa6e756d5f71756575656400a8616363657074656400a77265667573656400a866696e697368"
        "656402a66661696c656400a963616e63656c6c656400a76578706972656400a6746f6b656e7300ad7374616c655f656e"
        "747269657300af70726f746f636f6c5f6572726f727300ac736c6f775f7265616465727300aa6c6f73745f7065657273"
        "00af696e7465726e616c5f6572726f727300ae6a6f75726e616c5f746f6b656e7300ac6f7574626f785f627974657300"
    ),
    Kind.PONG: ("454e011500/80/80"),
    Kind.ERROR: (
        "454e011600/81a772657175657374a131/85a4636f6465a7696e76616c6964a76d657373616765a26e6fa56669656c64"
        "a670726f6d7074a772657175657374a131ad72657472795f61667465725f73cb3fe0000000000000"
    ),
    Kind.WORKER_HELLO: ("454e012100/95a5746f6b656e00036301"),
    Kind.WORKER_READY: ("454e012200/980340cd200010cd0800a573696d2d31c3a0"),
    Kind.EMISSIONS: ("454e012300/9b030905920b0c92010192000792010293414243921e00919501000400a090"),
    Kind.REPORT: ("454e012400/dc00100309cb3fd0000000000000640201cd1f40320020c30090cb00000000000000000000"),
    Kind.ASSIGN: ("454e013100/970b0105a1312aa674656e616e74a174"),
    Kind.WITHDRAW: ("454e013200/920b01"),
    Kind.DRAIN: ("454e014100/80/81a4736c6f7402"),
    Kind.RELOAD: ("454e014200/80/80"),
    Kind.STOP: ("454e014300/80/81a36e6f77c3"),
    Kind.ADMIN_REPLY: (
        "454e015100/80/83a26f6bc3a76d657373616765a4646f6e65a76368616e67656491ae66726f6e742e7363616e5f6d6178"
    ),
    Kind.TOKENIZE: (
        "454e010800/82a772657175657374a23f31a5726f757465a373696d/82a474657874a26869ab6164645f7370656369616cc2"
    ),
    Kind.METRICS: ("454e010900/80/80"),
    Kind.COUNT: ("454e010a00/80/81a8726571756573747381ae2f76312f6d6f64656c732032303003"),
    Kind.TOKENIZED: (
        "454e011700/81a772657175657374a23f31/83a3696473926869a474657874a26869ad6d61785f6d6f64656c5f6c656ecd0800"
    ),
    Kind.METRICS_TEXT: ("454e011800/80"),
    Kind.ANSWER: ("454e012500/940305a23f31c3"),
    Kind.ASK: ("454e013300/9205a23f31"),
}

EVENT_BYTES = {
    "delta": ("85a474797065a564656c7461a772657175657374a131a5696e64657802a474657874a26162a3696473926162"),
    "finished": (
        "89a474797065a866696e6973686564a772657175657374a131a5696e64657804a474657874a163a36964739163a67265"
        "61736f6ea473746f70a5757361676583ad70726f6d70745f746f6b656e7303b1636f6d706c6574696f6e5f746f6b656e"
        "7304ad6361636865645f746f6b656e7302a4736565642aa76d617463686564a10a"
    ),
    "failed": (
        "85a474797065a66661696c6564a772657175657374a131a4636f6465aa6f7665726c6f61646564a76d657373616765a4"
        "66756c6cad72657472795f61667465725f73cb3fe0000000000000"
    ),
    "cancelled": ("83a474797065a963616e63656c6c6564a772657175657374a131b1636f6d706c6574696f6e5f746f6b656e7303"),
    "expired": (
        "84a474797065a765787069726564a772657175657374a131b1636f6d706c6574696f6e5f746f6b656e7303a76861735f72756ec3"
    ),
    "echo": (
        "86a474797065a46563686fa772657175657374a131a5696e64657800a474657874a26869a3696473926869a86c6f6770"
        "726f62739283a2696468a56279746573c40168a76c6f6770726f62c083a2696469a56279746573c40169a76c6f677072"
        "6f62cbbfe0000000000000"
    ),
    "ended": (
        "89a474797065a5656e646564a772657175657374a131a5696e64657804a474657874a163a36964739163a663686f6963"
        "6501a6726561736f6ea473746f70a76d617463686564a178a86c6f6770726f62739184a2696409a56279746573c40163"
        "a76c6f6770726f62cbbff0000000000000a3746f709183a2696409a56279746573c40163a76c6f6770726f62cbbff000"
        "0000000000"
    ),
}

# What earlier versions sent, with what it means today: new positions have their defaults.
OLDER_FRAMES = [
    (
        Kind.GENERATE,
        ("454e010200/82a772657175657374a131a5726f757465a373696d/82a670726f6d7074a26869aa6d61785f746f6b656e7304"),
    ),
    (Kind.WORKER_READY, ("454e012200/970340cd200010cd0800a573696d2d31c3")),
    (Kind.EMISSIONS, ("454e012300/9a030905920b0c92010192000792010293414243921e009193010004")),
    (Kind.REPORT, ("454e012400/9b0309cb3fd0000000000000640201cd1f40320020c3")),
    (Kind.EMISSIONS, ("454e012300/9b030905920b0c92010192000792010293414243921e00919301000490")),
    (Kind.REPORT, ("454e012400/9c0309cb3fd0000000000000640201cd1f40320020c300")),
]
