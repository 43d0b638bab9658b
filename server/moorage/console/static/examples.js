// Example policies for the playground; the first one is that of the README.

const placing = (score, more = "", before = "") => `from moorage.policy import place

class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        pass

    def eval(self, parameters, input_data, context):
${before}        return place(input_data, lambda fleet, demand: ${score}${more})
`;
export const EXAMPLES = [
	["the emptiest node", placing("fleet.free_gpu_milli()")],
	["the fullest node: large requests find room later", placing("-fleet.free_gpu_milli()")],
	["the fullest node, GPUs of one NVLink group", placing("-fleet.free_gpu_milli()", ", close=True")],
	["gangs over many racks", placing("-fleet.free_gpu_milli()", ', gang="spread"')],
	["small requests packed, large ones spread", placing("fleet.free_gpu_milli() * (1 if demand.gpus >= 4 else -1)")],
	["a score of named terms, which Why shows", placing('{"packed": -fleet.free_gpu_milli(), "cores left": fleet.cpu_free / 100}')],
	["prints what it sees", placing("-fleet.free_gpu_milli()", "", `        fleet = input_data["fleet"]
        print("nodes with a free GPU:", int((fleet.free_gpu_milli() >= 1000).sum()))
`)],
];
